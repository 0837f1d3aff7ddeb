"""Wall time by cause: every second belongs to exactly one. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeAccount:
    """Books the time of one loop. Owns the cause that runs now and the seconds of each since the last `take`."""

    def __init__(self, otherwise: str, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            otherwise: the cause of the time in which no other one was named.
        """
        self._cause, self._clock = otherwise, clock
        self._since = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Books the block to `cause`, less what blocks inside it are booked to."""
        before = self._switch(cause)
        try:
            yield
        finally:
            self._switch(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Books seconds of `source` to `target` after all, at most as many as `source` has."""
        self._settle()
        moved = min(seconds, self._seconds.get(source, 0.0))
        self._seconds[source] = self._seconds.get(source, 0.0) - moved
        self._seconds[target] = self._seconds.get(target, 0.0) + moved

    def take(self) -> dict[str, float]:
        """Seconds of each cause since the last call; their sum is the time between the two."""
        self._settle()
        taken, self._seconds = self._seconds, {}
        return taken

    def _switch(self, cause: str) -> str:
        self._settle()
        before, self._cause = self._cause, cause
        return before

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + now - self._since
        self._since = now
