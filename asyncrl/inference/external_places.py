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


class ExternalPlaces:
    """The places of one engine. A request of the run takes a place immediately, even if none is left: the engine queues
    it. An external request starts only while a place is left and fewer than `limits.external` run.

    Args:
        limits: None refuses every external request.
    """

    def __init__(self, limits: ExternalLimits | None) -> None:
        self._limits = limits
        self._taken = {False: 0, True: 0}
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def allowed(self) -> bool:
        return self._limits is not None

    @property
    def external(self) -> int:
        """External requests at the engine."""
        return self._taken[True]

    def take(self) -> None:
        """Takes a place for a request of the run."""
        self._taken[False] += 1

    async def take_external(self) -> None:
        """Waits for a place, first come, first served; the caller bounds the wait."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same loop iteration as the cancellation
                self.give_back(external=True)
            raise

    def give_back(self, *, external: bool) -> None:
        self._taken[external] -= 1
        self._grant()

    @property
    def _is_free(self) -> bool:
        limits = self._limits
        return limits is not None and self._taken[True] < limits.external and sum(self._taken.values()) < limits.total

    def _grant(self) -> None:
        while self._waiting and (self._waiting[0].done() or self._is_free):
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken[True] += 1
                turn.set_result(None)
