"""A publish as vLLM's four calls; staging precedes them, by our worker extension's calls."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Sequence
from typing import Any

from asyncrl.errors import DeadlineExceeded, WeightTransferError, explain
from asyncrl.inference.shared.publish_calls import PublishCalls
from asyncrl.types import Digest, Manifest, TransferSource

_LOOKS_S = 0.005, 0.1
"""First and longest polling interval for the end of staging; each poll costs a turn of vLLM's loop."""
_GRACE_S = 10.0
"""Extra time beyond the workers' own deadline."""


class VllmPublishCalls(PublishCalls):
    def __init__(self, llm: Any) -> None:
        super().__init__("vLLM")
        self._llm = llm
        self._staged: tuple[Manifest, TransferSource] | None = None
        """The staged publish."""

    async def stage(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """As `StagingEngine.stage_weights`; cancellation as in `receive`."""
        self._staged = None
        digest = await self._ended(self._stage, manifest, source, timeout_s)
        self._staged = manifest, source
        return digest

    async def load_staged(self, timeout_s: float) -> None:
        """As `StagingEngine.load_staged`; cancellation as in `receive`."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise WeightTransferError(explain("load staged weights", "none came whole", "stage a publish first"))
        await self.receive(*staged, timeout_s)

    async def _update(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Sequence[Sequence[Any]]:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        llm = self._llm
        if source != self._joined and not manifest.is_staged:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest({"source": pickle.dumps(source)}))
        await llm.start_weight_update()
        update = {"manifest": pickle.dumps(manifest), "timeout_s": timeout_s}
        await llm.update_weights(WeightTransferUpdateRequest(update))
        await llm.finish_weight_update()
        return await llm.collective_rpc("asyncrl_outcome")

    async def _stage(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Sequence[Sequence[Any]]:
        llm, (wait_s, longest_s), deadline = self._llm, _LOOKS_S, time.monotonic() + timeout_s + _GRACE_S
        await llm.collective_rpc("asyncrl_stage", args=(pickle.dumps(source), pickle.dumps(manifest), timeout_s))
        while None in (outcomes := await llm.collective_rpc("asyncrl_staged")):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"its workers keep no deadline: publish {manifest.publish_id} goes on")
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, longest_s)
        return outcomes
