"""The adapter's side of a publish: vLLM's four calls, and the outcomes of its workers."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Sequence
from typing import Any

from asyncrl import errors
from asyncrl.errors import AsyncRLError, DeadlineExceeded, TransferEnded, WeightTransferError, explain
from asyncrl.types import Digest, Manifest, TransferSource

_GRACE_S = 2.0
"""Time that vLLM has beyond the deadline of its workers, so that their own error arrives."""


class VllmTransfer:
    """Applies publishes to the workers of `llm`, one after the other."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._source: TransferSource | None = None
        self._publish: asyncio.Task[Digest | None] | None = None

    async def receive(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """As `InferenceEngine.load_weights`. After a cancellation or a missed deadline the calls still run to their
        end: a publish that was left half done would block the next one."""
        deadline = time.monotonic() + timeout_s
        asked = f"load the weights of publish {manifest.publish_id} within {timeout_s:g} s"
        if self._publish is not None and not self._publish.done():
            await asyncio.wait((self._publish,), timeout=timeout_s)
            if not self._publish.done():
                found = "vLLM has not ended the publish before it"
                raise DeadlineExceeded(explain(asked, found, "restart the replica"))
        self._publish = asyncio.create_task(self._run(manifest, source, deadline), name="vllm-weight-update")
        self._publish.add_done_callback(_look_at_the_error)
        await asyncio.wait((self._publish,), timeout=deadline - time.monotonic() + _GRACE_S)
        if not self._publish.done():
            raise DeadlineExceeded(explain(asked, "no answer of vLLM's workers", "raise weights.timeout_s"))
        return self._publish.result()

    def close(self) -> None:
        if self._publish is not None:
            self._publish.cancel()

    async def _run(self, manifest: Manifest, source: TransferSource, deadline: float) -> Digest | None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        llm = self._llm
        try:
            if source != self._source:
                self._source = None
                await llm.init_weight_transfer_engine(WeightTransferInitRequest({"source": pickle.dumps(source)}))
            await llm.start_weight_update()
            update = {"manifest": pickle.dumps(manifest), "timeout_s": max(0.0, deadline - time.monotonic())}
            await llm.update_weights(WeightTransferUpdateRequest(update))
            await llm.finish_weight_update()
            outcomes = await llm.collective_rpc("asyncrl_outcome")
        except Exception as error:
            asked = f"update the weights of vLLM, publish {manifest.publish_id}"
            raise WeightTransferError(
                explain(asked, f"{type(error).__name__}: {error}", "look at the log of its processes")
            ) from error
        digest = agree(outcomes)
        self._source = source
        return digest


def agree(outcomes: Sequence[Sequence[Any]]) -> Digest | None:
    """The digest that all workers computed; 0 for a tensor on which they differ, which no sender computes.

    Args:
        outcomes: per worker (name of the error class or "", message, digest or None).

    Raises the error of the first worker that failed by itself; else that of one that only saw the transfer end.
    """
    failed = sorted((o for o in outcomes if o[0]), key=lambda o: o[0] == TransferEnded.__name__)
    if failed:
        name, message, _ = failed[0]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, AsyncRLError):
            raise kind(message)
        raise WeightTransferError(
            explain("update the weights of a vLLM worker", f"{name}: {message}", "see the log of its processes")
        )
    digests = [outcome[2] for outcome in outcomes]
    if any(digest is None for digest in digests):
        return None
    return tuple(values[0] if len(set(values)) == 1 else 0 for values in zip(*digests, strict=True))


def _look_at_the_error(task: asyncio.Task[Any]) -> None:
    """Retrieves the error of a publish whose caller has already got a DeadlineExceeded."""
    if not task.cancelled():
        task.exception()
