"""Reads the stacks of all threads of another process, even if that process answers no call.

`install` makes SIGUSR2 write the stacks into anonymous memory of the process. It uses `faulthandler`, which also works
inside C code and with a blocked event loop. `read` sends the signal and reads that memory through /proc. This needs
Linux; elsewhere, and for a process that never called `install`, py-spy is used if it is installed.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

_NAME = "asyncrl-stacks"
PY_SPY_TIMEOUT_S = 10.0


def install() -> None:
    """Makes this process answer `read`. Does nothing on systems without memfd."""
    if not hasattr(os, "memfd_create") or not hasattr(faulthandler, "register"):
        return
    descriptor = os.memfd_create(_NAME)
    os.set_inheritable(descriptor, False)
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)


def read(pid: int, timeout_s: float = 1.0) -> str:
    """The stacks of the threads of process `pid`, or the reason why they cannot be read. Does not raise."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_STOPPED:
            return f"process {pid} is stopped (SIGSTOP): it runs no code, and would not answer"
        memory = _memory(pid)
        if memory is None:
            return _py_spy(pid)
        before = memory.stat().st_size
        process.send_signal(signal.SIGUSR2)
        deadline, size = time.monotonic() + timeout_s, before
        # The handler appends to the memory file: wait until it has grown and stopped growing.
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = memory.stat().st_size
            if now > before and now == size:
                break
            size = now
        with memory.open("rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace") or f"process {pid} did not answer within {timeout_s:g} s"
    except (psutil.Error, OSError, subprocess.SubprocessError) as error:
        return f"the stacks of process {pid} cannot be read: {error}"


def _memory(pid: int) -> Path | None:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it was just closed
            if _NAME in os.readlink(link):
                return link
    return None


def _py_spy(pid: int) -> str:
    tool = shutil.which("py-spy")
    if tool is None:
        return f"process {pid} has no handler for stacks, and py-spy is not installed"
    done = subprocess.run(
        [tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=False
    )
    return done.stdout or done.stderr
