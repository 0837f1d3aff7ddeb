"""CPU time of a process and its descendants, and the scheduling priority of engines on CPUs."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

LOOK_S = 10.0
PROC = Path("/proc")


class CpuTime:
    """CPU seconds of this process and its descendants, which are listed again every `LOOK_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked = clock, -math.inf
        self._this = psutil.Process()
        self._below: list[psutil.Process] = []

    def total_s(self) -> float:
        return _seconds(self._this) + self.below_s()

    def below_s(self) -> float:
        """CPU seconds of the descendants alone."""
        if self._clock() - self._looked >= LOOK_S:
            self._below, self._looked = _below(self._this), self._clock()
        return sum(map(_seconds, self._below))


def _below(process: psutil.Process) -> list[psutil.Process]:
    """The descendants. A Linux kernel built with CONFIG_PROC_CHILDREN lists the children of each process; otherwise
    psutil scans all processes of the machine, 20 us each."""
    if not (PROC / str(process.pid) / "task" / str(process.pid) / "children").exists():
        return process.children(recursive=True)
    found = []
    for pid in _listed_below(process.pid):
        with contextlib.suppress(psutil.Error):  # it has ended
            found.append(psutil.Process(pid))
    return found


def _listed_below(pid: int) -> Iterator[int]:
    threads: list[Path] = []
    with contextlib.suppress(OSError):  # the process has ended
        threads = list((PROC / str(pid) / "task").iterdir())
    # Each thread lists the children that it started itself.
    for thread in threads:
        children: list[int] = []
        with contextlib.suppress(OSError):  # the thread has ended
            children = [int(word) for word in (thread / "children").read_text().split()]
        for child in children:
            yield child
            yield from _listed_below(child)


def _seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):  # it has ended
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


# Priority of engines on CPUs that the rest of a run shares.


DECODE_NICENESS = 2
"""Niceness of a decode loop above trainer ranks, the queue and rollouters, which may share its cores: a step waits for
them."""
SERVER_NICENESS = 5
"""Of the server of a run, whose processes have priority on this machine's cores."""


def yield_to_others() -> None:
    """Lowers the priority of this thread, and of threads and processes that it starts later. Linux only: elsewhere
    niceness applies to the whole process."""
    if sys.platform == "linux":
        os.nice(DECODE_NICENESS)
