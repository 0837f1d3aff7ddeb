"""Limits how often something may be restarted. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class RestartBudget:
    """Counts restarts: at most `max_restarts` within any `window_s` seconds."""

    def __init__(self, max_restarts: int, window_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._clock = clock
        self._times: deque[float] = deque()
        self.total = 0

    def take(self) -> bool:
        """Counts one restart; False, and nothing counted, when the budget is spent."""
        now = self._clock()
        while self._times and now - self._times[0] > self._window_s:
            self._times.popleft()
        if len(self._times) >= self._max_restarts:
            return False
        self._times.append(now)
        self.total += 1
        return True

    def __str__(self) -> str:
        return f"{len(self._times)} restart(s) within {self._window_s:g} s"
