"""An event loop whose clock jumps to the next timer: waits of asyncio take no time, and come in their order."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """For code that waits by asyncio alone. Work in threads is waited for in real time, while the clock stands still
    only as long as no timer is due."""

    _now_s = 0.0
    _timer_cancelled_count: int

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count = max(0, self._timer_cancelled_count - 1)
        if timers and not self._ready:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, timers[0].when())
        super()._run_once()  # type: ignore[misc]


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, run on a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
