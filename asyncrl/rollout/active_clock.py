"""A deadline that the time in the queues of replicas does not bring closer. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 1.0
"""Shortest time between two looks at a clock that stands still, as long as a tenth of the limit is no less."""


class ActiveClock:
    """The seconds that a response, or a trajectory, has left. It stands still while a request waits for a place at a
    replica and none samples.

    How long a request waits says how much work the run has admitted, not that something is wrong with the request:
    with `max_lag` steps of groups at once it is `max_lag` steps of the trainer.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """It runs from here on."""
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
        """Its first token has come."""
        self._book()
        self._waiting -= 1
        self._sampling += 1

    def end(self, *, sampled: bool) -> None:
        """A request has ended; `sampled`: with tokens."""
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
        """Seconds after which to look again: it cannot be late before, or only by `LOOK_S`."""
        return max(self.left_s, min(LOOK_S, self.limit_s / 10))

    def _book(self) -> None:
        now = self._clock()
        if self._sampling or not self._waiting:
            self._spent_s += now - self._since
        self._since = now
