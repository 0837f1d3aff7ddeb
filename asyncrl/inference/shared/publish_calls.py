"""The adapter's side of a publish: the calls to an engine under one deadline, and the outcomes of its workers."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from asyncrl import errors
from asyncrl.errors import AsyncRLError, DeadlineExceeded, TransferEnded, WeightTransferError, explain
from asyncrl.types import Digest, Manifest, TransferSource

_GRACE_S = 2.0
"""Extra time beyond the workers' deadline, so that their error arrives first."""


_Calls = Callable[[Manifest, TransferSource, float], Awaitable[Sequence[Sequence[Any]]]]


class PublishCalls(ABC):
    """Applies publishes to the workers of one engine, one at a time."""

    def __init__(self, package: str) -> None:
        """`package`: the engine's name in messages."""
        self._package = package
        self._joined: TransferSource | None = None
        """The source that the workers have joined."""
        self._publish: asyncio.Task[Digest | None] | None = None

    @abstractmethod
    async def _update(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Sequence[Sequence[Any]]:
        """Makes all calls of one publish; returns each worker's `WorkerUpdate.outcome`. `self._joined` is the source of
        the last publish, or None if it failed."""

    async def receive(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """Implements `InferenceEngine.load_weights`. The calls run to their end even after a cancellation or missed
        deadline: a half-done publish would block the next one."""
        return await self._ended(self._update, manifest, source, timeout_s)

    async def _ended(
        self, calls: _Calls, manifest: Manifest, source: TransferSource, timeout_s: float
    ) -> Digest | None:
        """Like `receive`, with these calls."""
        deadline = time.monotonic() + timeout_s
        asked = f"load the weights of publish {manifest.publish_id} within {timeout_s:g} s"
        # An abandoned publish must end first: its calls would interleave with these.
        if self._publish is not None and not self._publish.done():
            await asyncio.wait((self._publish,), timeout=timeout_s)
            if not self._publish.done():
                found = f"{self._package} has not ended the publish before it"
                raise DeadlineExceeded(explain(asked, found, "restart the replica"))
        self._publish = asyncio.create_task(self._run(calls, manifest, source, deadline), name="weight-update")
        # Marks the error of an abandoned publish as retrieved: its caller got DeadlineExceeded.
        self._publish.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait((self._publish,), timeout=deadline - time.monotonic() + _GRACE_S)
        if not self._publish.done():
            found = f"no answer of {self._package}'s workers"
            raise DeadlineExceeded(explain(asked, found, "raise weights.transfer_timeout_s"))
        return self._publish.result()

    def close(self) -> None:
        if self._publish is not None:
            self._publish.cancel()

    async def _run(self, calls: _Calls, manifest: Manifest, source: TransferSource, deadline: float) -> Digest | None:
        if source != self._joined:
            self._joined = None
        try:
            outcomes = await calls(manifest, source, max(0.0, deadline - time.monotonic()))
        except Exception as error:
            asked = f"update the weights of {self._package}, publish {manifest.publish_id}"
            do = "look at the log of its processes"
            raise WeightTransferError(explain(asked, f"{type(error).__name__}: {error}", do)) from error
        digest = agree(outcomes)
        self._joined = source
        return digest


def agree(outcomes: Sequence[Sequence[Any]]) -> Digest | None:
    """The workers' common digest; 0, which no sender computes, for tensors on which they differ.

    Args:
        outcomes: per worker (name of the error class or "", message, digest or None).

    Raises the first worker's error, preferring causes over `TransferEnded`.
    """
    failed = sorted((o for o in outcomes if o[0]), key=lambda o: o[0] == TransferEnded.__name__)
    if failed:
        name, message, _ = failed[0]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, AsyncRLError):
            raise kind(message)
        do = "look at the worker's log"
        raise WeightTransferError(explain("update the weights of an engine's worker", f"{name}: {message}", do))
    digests = [outcome[2] for outcome in outcomes]
    if any(digest is None for digest in digests):
        return None
    return tuple(values[0] if len(set(values)) == 1 else 0 for values in zip(*digests, strict=True))
