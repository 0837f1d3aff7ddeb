"""A deadline that excludes the time in which requests wait for a place at a replica. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 1.0
"""Shortest time between two looks at a stopped clock, unless a tenth of the limit is shorter."""


class ActiveClock:
    """The seconds that a response or a trajectory has left. Stopped while a request waits for a place at a replica and
    no other request samples.

    The wait for a place reflects how much work the run has admitted (up to `max_lag` steps of groups), not a fault of
    the request.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the clock."""
        self.limit_s = limit_s
        self._clock = clock
        self._spent_s = 0.0
        self._since = clock()
        self._waiting = self._sampling = 0

    def wait(self) -> None:
        """A request was sent to a replica."""
        self._book()
        self._waiting += 1

    def sample(self) -> None:
        """The first token of a request has arrived."""
        self._book()
        self._waiting -= 1
        self._sampling += 1

    def end(self, *, sampled: bool) -> None:
        """A request has ended; `sampled`: it had received tokens."""
        self._book()
        if sampled:
            self._sampling -= 1
        else:
            self._waiting -= 1

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, if nothing waits from now on; 0 or less when it has passed."""
        self._book()
        return self.limit_s - self._spent_s

    def look_s(self) -> float:
        """Seconds until the next check of the deadline, which then detects a miss at most `LOOK_S` late."""
        return max(self.left_s, min(LOOK_S, self.limit_s / 10))

    def _book(self) -> None:
        now = self._clock()
        if self._sampling or not self._waiting:
            self._spent_s += now - self._since
        self._since = now
