"""How often CPython's garbage collector visits objects: seldom in the driver and in Ray's workers, and without long
pauses in one whose event loop holds many."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import psutil

YOUNG_OBJECTS = 5000
"""New objects between two collections of the youngest, each about 2 ms."""
SET_ASIDE_S = 1.0
GROWTH, ROOM_BYTES = 1.3, 512 << 20
"""A full collection is made when the process has grown by this factor and by so much since the last one: its pause
grows with what is in flight (1 s at 6,000 requests), and so does the memory at the start of every run."""
_NEVER = 1_000_000
_SELDOM = (50_000, 20, 20)


def collect_seldom() -> None:
    """For the rest of this process. With Python's own 700 new objects between two collections, and 10 between those
    of older ones, a quarter of the time of an import goes into visiting what has just been imported."""
    gc.set_threshold(*_SELDOM)


class PauselessCollector:
    """Owns the settings of this process's garbage collector while `run` runs.

    CPython's full collections visit every object of the process while no token is delivered. Here only the youngest
    objects are visited, and what survives is set aside unvisited. Cycles that die later are found by a full collection,
    which is made only when memory has grown.
    """

    def __init__(self, memory_bytes: Callable[[], int] = lambda: psutil.Process().memory_info().rss) -> None:
        self._memory_bytes = memory_bytes
        self._after_full = 0
        self.full_collections = 0

    async def run(self) -> None:
        """Consumes and produces nothing. Waits for the clock. Stops when it is cancelled; the settings before are
        restored then."""
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
        """Sets the survivors aside, and collects everything when memory has grown."""
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
