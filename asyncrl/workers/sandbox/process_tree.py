"""Ends a child process together with its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import psutil


def kill_tree(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Kills a child, the group it leads, and its descendants in other groups. Blocks; returns False if the child has
    not ended within `wait_s` seconds. Daemons (descendants without their parent) are not found.
    """
    below = []
    if process.poll() is None:
        with suppress(psutil.Error):
            below = psutil.Process(process.pid).children(recursive=True)
    kill_group(process.pid)
    for child in below:
        with suppress(psutil.Error):  # already killed with the group
            child.kill()
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return False  # it ends with its system call in the kernel
    return True


def kill_group(group: int) -> None:
    with suppress(OSError):  # the group has ended
        os.killpg(group, signal.SIGKILL)
