"""The protocol that every inference engine implements; its conformance suite is `asyncrl_testing.engine_suite`.

Optional capabilities are separate protocols, so that no engine has a method that always raises.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from asyncrl.types import Digest, EngineHealth, GenerationRequest, Manifest, PauseMode, TokenChunk, TransferSource


class InferenceEngine(Protocol):
    """One copy of the policy. All methods are called from one asyncio loop.

    Versions: an engine starts with version None (dummy weights) unless it was built to load real ones. `commit`
    stamps every token sampled after it. A paused engine starts no request: `generate` waits.
    """

    async def start(self) -> None:
        """Loads the model; returns when requests can be served. Raises GenerationError."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Streams the tokens of one request; only the last chunk has a `finish_reason`.

        Raises GenerationError: the request does not fit the engine, or the engine has stopped.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        """Ends these requests (None: all, queued ones included) with finish_reason "abort", keeping the tokens so far.
        Unknown ids are ignored: they may just have finished."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no token is being sampled. abort: `abort(None)`. keep: requests freeze and continue at `resume`
        with their KV cache. drain: running requests finish first, queued requests stay queued. Idempotent."""
        ...

    async def load_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """Receives and applies one publish while paused; returns this side's digest if `manifest.verify`.

        Raises WeightTransferError, DeadlineExceeded; the weights are then undefined and the caller keeps the
        engine paused.
        """
        ...

    async def commit(self, version: int | None) -> None:
        """Stamps tokens sampled from now on with `version`; None keeps the current version."""
        ...

    async def resume(self) -> None:
        """Continues sampling. Idempotent."""
        ...

    def health(self) -> EngineHealth: ...

    async def stop(self) -> None:
        """Ends all requests with GenerationError and frees everything. Idempotent."""
        ...


@runtime_checkable
class StagingEngine(Protocol):
    """An engine that receives a publish while it samples, and pauses only while it applies the weights."""

    async def stage_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """Receives one publish into host memory, paused or not; returns the digest like `load_weights`.

        Raises WeightTransferError, DeadlineExceeded; the served weights are unchanged.
        """
        ...

    async def load_staged(self, timeout_s: float) -> None:
        """Applies the last staged publish, once, while paused. Raises the errors of `load_weights`."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release its GPU memory while it is paused and has no requests."""

    async def sleep(self) -> None:
        """Releases the memory of weights and KV cache. It may drop the weights: a publish must follow `wake_up`.

        Raises GenerationError: not set up, not paused, or requests are frozen.
        """
        ...

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Reallocates the memory of these tags ("weights", "kv_cache"; None: both); the engine stays paused. Raises the
        errors of `sleep`."""
        ...
