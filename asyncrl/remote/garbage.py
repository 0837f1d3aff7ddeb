"""Tuning of CPython's garbage collector: rare collections in the driver and in Ray's workers, and no long pauses in a
process whose event loop holds many objects."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import psutil

YOUNG_OBJECTS = 5000
"""Allocations between two collections of the young generation, about 2 ms each."""
SET_ASIDE_S = 1.0
GROWTH, ROOM_BYTES = 1.3, 512 << 20
"""A full collection runs once memory has grown by both since the last one. Its pause grows with the requests in flight
(1 s at 6,000), and memory always grows at the start of a run."""
_NEVER = 1_000_000
_SELDOM = (50_000, 20, 20)


def collect_seldom() -> None:
    """Makes collections rare for the rest of this process. With Python's default thresholds (700, 10, 10), a quarter of
    import time goes into visiting objects just imported."""
    gc.set_threshold(*_SELDOM)


class PauselessCollector:
    """Owns the settings of this process's garbage collector while `run` runs.

    CPython's full collections stop the process while they visit every object. Here only young objects are visited, and
    survivors are frozen (`gc.freeze`). A full collection, once memory has grown, finds the cycles that died later.
    """

    def __init__(self, memory_bytes: Callable[[], int] = lambda: psutil.Process().memory_info().rss) -> None:
        self._memory_bytes = memory_bytes
        self._after_full = 0
        self.full_collections = 0

    async def run(self) -> None:
        """Consumes and produces nothing. Waits for the clock. Stops when it is cancelled; it then restores the previous
        settings."""
        before = gc.get_threshold()
        gc.set_threshold(YOUNG_OBJECTS, _NEVER, _NEVER)
        try:
            self._collect()
            while True:
                await asyncio.sleep(SET_ASIDE_S)
                self.tick()
        finally:
            gc.unfreeze()
            gc.set_threshold(*before)

    def tick(self) -> None:
        """Freezes the survivors, or collects everything if memory has grown."""
        if self._memory_bytes() > max(GROWTH * self._after_full, self._after_full + ROOM_BYTES):
            gc.unfreeze()
            self._collect()
        else:
            gc.freeze()

    def _collect(self) -> None:
        gc.collect()
        gc.freeze()
        self._after_full = self._memory_bytes()
        self.full_collections += 1
