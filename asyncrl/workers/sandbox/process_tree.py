"""Ends a child process together with its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import psutil


def kill_tree(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Kills a child that leads a group, its group, and its descendants in groups of their own. Returns False when the
    child has not ended `wait_s` seconds later. Blocks. A descendant that left its parent too (a daemon) is not found.
    """
    below = []
    if process.poll() is None:
        with suppress(psutil.Error):
            below = psutil.Process(process.pid).children(recursive=True)
    kill_group(process.pid)
    for child in below:
        with suppress(psutil.Error):  # it went with the group
            child.kill()
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return False  # in the kernel's hands: it ends when its system call does
    return True


def kill_group(group: int) -> None:
    with suppress(OSError):  # all of it has ended
        os.killpg(group, signal.SIGKILL)
