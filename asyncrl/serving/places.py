"""How many requests of an HTTP server may be at the replicas at the same time."""

from __future__ import annotations

import asyncio
from collections import deque


class PlaceQueue:
    """A semaphore in order of arrival whose size follows the number of replicas. Owns the requests that wait.

    Args:
        per_replica: places that each replica adds.
    """

    def __init__(self, per_replica: int) -> None:
        self._per_replica = per_replica
        self._size = 0
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def waiting(self) -> int:
        return sum(not turn.done() for turn in self._waiting)

    def set_replicas(self, count: int) -> None:
        """Sizes it for so many replicas. Those that have a place keep it, also when there are more of them now."""
        self._size = count * self._per_replica
        self._grant()

    async def __aenter__(self) -> None:
        """Waits for a place, behind those that came before; the caller bounds the wait."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was granted in the turn of the cancellation
                self._leave()
            raise

    async def __aexit__(self, *failure: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._taken -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and (self._waiting[0].done() or self._taken < self._size):
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
