"""The sleep of one engine: what of its memory is given back, and for how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from asyncrl.errors import GenerationError, explain
from asyncrl.inference.engine import InferenceEngine, SleepingEngine

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class EngineSleep:
    """Puts an engine to sleep and wakes it in two parts: its weights before they are received, and its KV cache after
    that, when the sender has given its own buffers back.

    It sleeps at level 2: every sleep ends with a publish, which brings all weights.
    """

    def __init__(self, engine: InferenceEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._one = asyncio.Lock()
        """A call whose caller has given up goes on: the next one waits for its end."""
        self._asleep: list[str] = []
        """The parts that are given back."""
        self._since = 0.0
        self._asleep_s = 0.0
        self.waking_s = 0.0
        """Time that the engine took to take memory back, since its start."""

    @property
    def asleep_s(self) -> float:
        """Time that the engine has slept since its start: until its weights had their memory again."""
        return self._asleep_s + (self._clock() - self._since if WEIGHTS in self._asleep else 0.0)

    async def begin(self) -> None:
        """Gives all memory back; the engine is paused. One that was woken in part is woken first. Idempotent.

        Raises GenerationError: the engine cannot sleep.
        """
        async with self._one:
            if len(self._asleep) == 2:
                return
            await self._end()
            await self._sleeper().sleep(level=2)
            self._asleep, self._since = [WEIGHTS, KV_CACHE], self._clock()

    async def wake_weights(self) -> None:
        """Takes the memory of the weights back; their values are undefined. Does nothing when they have it."""
        async with self._one:
            await self._wake_weights()

    async def end(self) -> None:
        """Takes back what is still missing. Does nothing when the engine is awake."""
        async with self._one:
            await self._end()

    async def _wake_weights(self) -> None:
        if WEIGHTS in self._asleep:
            slept_s = self._clock() - self._since
            await self._wake(WEIGHTS)
            self._asleep_s += slept_s

    async def _end(self) -> None:
        await self._wake_weights()
        if KV_CACHE in self._asleep:
            await self._wake(KV_CACHE)

    async def _wake(self, part: str) -> None:
        began = self._clock()
        await self._sleeper().wake_up([part])
        self._asleep.remove(part)
        self.waking_s += self._clock() - began

    def _sleeper(self) -> SleepingEngine:
        if not isinstance(self._engine, SleepingEngine):
            found = "it has no memory that it could give back"
            raise GenerationError(explain(f"sleep of {type(self._engine).__name__}", found, "set placement=separate"))
        return self._engine
