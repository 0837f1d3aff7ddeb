"""What a process and those that it has started take of the processors."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import psutil

LOOK_S = 10.0


class CpuTime:
    """CPU seconds of this process and of those below it. To find these takes a walk over all processes of the machine:
    it is made every `LOOK_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked = clock, -math.inf
        self._this = psutil.Process()
        self._below: list[psutil.Process] = []

    def total_s(self) -> float:
        return _seconds(self._this) + self.below_s()

    def below_s(self) -> float:
        """Those of the processes below it alone."""
        if self._clock() - self._looked >= LOOK_S:
            self._below, self._looked = self._this.children(recursive=True), self._clock()
        return sum(map(_seconds, self._below))


def _seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):  # it has ended
        times = process.cpu_times()
        return times.user + times.system
    return 0.0
