"""A publish as vLLM's four calls."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from asyncrl.inference.shared.publish_calls import PublishCalls
from asyncrl.types import Manifest, TransferSource


class VllmPublishCalls(PublishCalls):
    def __init__(self, llm: Any) -> None:
        super().__init__("vLLM")
        self._llm = llm

    async def _update(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Sequence[Sequence[Any]]:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        llm = self._llm
        if source != self._joined:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest({"source": pickle.dumps(source)}))
        await llm.start_weight_update()
        update = {"manifest": pickle.dumps(manifest), "timeout_s": timeout_s}
        await llm.update_weights(WeightTransferUpdateRequest(update))
        await llm.finish_weight_update()
        return await llm.collective_rpc("asyncrl_outcome")
