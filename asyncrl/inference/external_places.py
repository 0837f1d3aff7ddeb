"""Admission of requests from outside a run to one replica's engine, at lower priority than the run's requests."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExternalLimits:
    """`total`: requests that the engine decodes concurrently. `external`: how many of the `total` may come from outside
    the run. `timeout_s`: longest wait of an external request for the gate and a place; the server that sends it has
    separate deadlines."""

    total: int
    external: int
    timeout_s: float = 600.0

    @classmethod
    def of(cls, total: int, share: float, timeout_s: float = 600.0) -> ExternalLimits:
        """`share` of the places, at least one."""
        return cls(total, max(1, math.floor(share * total)), timeout_s)


class PlaceQueue:
    """A semaphore, first come, first served, whose size changes. Owns the waiting requests."""

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.taken = 0

    @property
    def waiting(self) -> int:
        return sum(not turn.done() for turn in self._waiting)

    def resize(self, size: int) -> None:
        """Requests keep their places, even beyond the new size."""
        self._size = size
        self._grant()

    async def acquire(self) -> None:
        """Waits for a place behind earlier requests; the caller bounds the wait."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same loop iteration as the cancellation
                self.release()
            raise

    def release(self) -> None:
        self.taken -= 1
        self._grant()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *failure: object) -> None:
        self.release()

    def _grant(self) -> None:
        while self._waiting and (self._waiting[0].done() or self.taken < self._size):
            turn = self._waiting.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)


class ExternalPlaces(PlaceQueue):
    """The places of one engine for external requests: at most `limits.external`, and only those that the run leaves.

    A request of the run takes a place immediately, even if none is left: the engine queues it.

    Args:
        limits: None refuses every external request.
    """

    def __init__(self, limits: ExternalLimits | None) -> None:
        super().__init__(0 if limits is None else min(limits.external, limits.total))
        self._limits = limits
        self._of_run = 0

    @property
    def allowed(self) -> bool:
        return self._limits is not None

    def count_run(self, change: int) -> None:
        """A request of the run takes a place (`change` 1) or gives it back (-1)."""
        self._of_run += change
        if self._limits is not None:
            self.resize(min(self._limits.external, self._limits.total - self._of_run))
