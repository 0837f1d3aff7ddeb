"""Shared by the suites of inference engines: requests, and a client that keeps every chunk."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from asyncrl.inference.engine import InferenceEngine
from asyncrl.types import GenerationRequest, SamplingParams, TokenChunk

MakeEngine = Callable[[], Awaitable[InferenceEngine]]
T = TypeVar("T")

_TRIES = 5

_numbers = itertools.count()


def make_request(
    *,
    prompt: Sequence[int] = (5, 6, 7, 8),
    max_tokens: int = 24,
    seed: int = 0,
    first_position: int = 0,
    stop: Sequence[int] = (),
    **sampling: Any,
) -> GenerationRequest:
    """`sampling`: the other fields of SamplingParams."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop), **sampling)
    ids = np.array(prompt, dtype=np.int32)
    return GenerationRequest(f"suite-{next(_numbers)}", ids, params, seed=seed, first_position=first_position)


async def within(wait: Awaitable[T], timeout_s: float = 120.0) -> T:
    """The wait of a test: it fails with TimeoutError instead of hanging."""
    async with asyncio.timeout(timeout_s):
        return await wait


class TooLate(Exception):
    """A response ended before the test, which other processes held up, could interrupt it."""


def again_if_late(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A test that interrupts a response in the middle: begins again when it came too late."""

    @functools.wraps(test)
    async def tries(*args: Any, **fixtures: Any) -> None:
        for _ in range(_TRIES - 1):
            try:
                return await test(*args, **fixtures)
            except TooLate:
                if "engine" in fixtures:
                    await within(fixtures["engine"].resume())
        await test(*args, **fixtures)

    return tries


class Client:
    """Consumes one request in the background and keeps every chunk."""

    def __init__(self, engine: InferenceEngine, request: GenerationRequest) -> None:
        self.request = request
        self.chunks: list[TokenChunk] = []
        self.task = asyncio.create_task(self._consume(engine))
        self._arrived = asyncio.Event()

    async def _consume(self, engine: InferenceEngine) -> None:
        async for chunk in engine.generate(self.request):
            self.chunks.append(chunk)
            self._arrived.set()

    async def first_tokens(self) -> None:
        await within(self._arrived.wait())

    def require_unfinished(self) -> None:
        """Raises TooLate: it has all its tokens."""
        if self.finish_reasons == ["length"]:
            raise TooLate(f"all of the {len(self.ids)} tokens came before the interruption")

    async def done(self) -> Client:
        await within(self.task)
        return self

    @property
    def ids(self) -> list[int]:
        return [int(i) for chunk in self.chunks for i in chunk.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [float(x) for chunk in self.chunks for x in chunk.logprobs]

    @property
    def finish_reasons(self) -> list[str]:
        return [chunk.finish_reason for chunk in self.chunks if chunk.finish_reason is not None]

    @property
    def versions(self) -> list[int]:
        """One per token."""
        return [chunk.version for chunk in self.chunks for _ in chunk.token_ids]


async def complete(engine: InferenceEngine, **kwargs: Any) -> Client:
    return await Client(engine, make_request(**kwargs)).done()


async def settle() -> None:
    """Gives an engine that wrongly goes on the time to show it."""
    await asyncio.sleep(0.05)
