"""Sleep of one engine: which memory is released, and for how long."""

from __future__ import annotations

import asyncio
import time

from asyncrl.errors import GenerationError, explain
from asyncrl.inference.engine import InferenceEngine, SleepingEngine

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class EngineSleep:
    """Puts an engine to sleep and wakes it in two parts: the weights before they are received, the KV cache afterwards,
    when the sender has released its buffers.

    Uses level 2, which drops the weights: every sleep ends with a publish of all weights.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._one = asyncio.Lock()
        """Serializes calls: a call continues after its caller gave up, so the next must wait for it."""
        self._asleep: list[str] = []
        """The released parts."""
        self._since = 0.0
        self._asleep_s = 0.0
        self.waking_s = 0.0
        """Total time spent reallocating memory."""

    @property
    def asleep_s(self) -> float:
        """Total time asleep; each sleep counts until the weights have memory again."""
        return self._asleep_s + (time.monotonic() - self._since if WEIGHTS in self._asleep else 0.0)

    async def begin(self) -> None:
        """Releases all memory of the paused engine; a partly woken engine is woken first. Idempotent.

        Raises GenerationError: the engine cannot sleep.
        """
        async with self._one:
            if len(self._asleep) == 2:
                return
            await self._end()
            await self._sleeper().sleep()
            self._asleep, self._since = [WEIGHTS, KV_CACHE], time.monotonic()

    async def wake_weights(self) -> None:
        """Reallocates the weights, with undefined values. Idempotent."""
        async with self._one:
            await self._wake_weights()

    async def end(self) -> None:
        """Reallocates every part still released. Idempotent."""
        async with self._one:
            await self._end()

    async def _wake_weights(self) -> None:
        if WEIGHTS in self._asleep:
            slept_s = time.monotonic() - self._since
            await self._wake(WEIGHTS)
            self._asleep_s += slept_s

    async def _end(self) -> None:
        await self._wake_weights()
        if KV_CACHE in self._asleep:
            await self._wake(KV_CACHE)

    async def _wake(self, part: str) -> None:
        began = time.monotonic()
        await self._sleeper().wake_up([part])
        self._asleep.remove(part)
        self.waking_s += time.monotonic() - began

    def _sleeper(self) -> SleepingEngine:
        if not isinstance(self._engine, SleepingEngine):
            found = "it has no memory that it could give back"
            raise GenerationError(explain(f"sleep of {type(self._engine).__name__}", found, "set placement=separate"))
        return self._engine
