"""vLLM's workers import this module, which registers the weight-transfer engine "asyncrl"."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.utils.nccl import unpinned_nccl_env

from asyncrl.inference.shared.orphan_watch import die_with
from asyncrl.inference.shared.weight_update import WorkerUpdate
from asyncrl.inference.vllm.compile_cache import complete_loaded_functions
from asyncrl.inference.vllm.launch import BACKEND, owner_pid
from asyncrl.inference.vllm.layerwise_reload import reload_of
from asyncrl.inference.vllm.scheduler_counts import hide_warning
from asyncrl.types import Digest, Manifest, TransferSource
from asyncrl.weights.encodings.decoder import Scope
from asyncrl.weights.transport import WeightSink


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`source`: a pickled TransferSource; its `receiver` is the number of the worker with tensor-parallel rank 0."""

    source: bytes


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`manifest`: a pickled Manifest. `timeout_s`: the remaining time of the publish."""

    manifest: bytes
    timeout_s: float


class AsyncrlWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Forwards vLLM's calls of a publish to a `WorkerUpdate`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        die_with(owner_pid())
        hide_warning()
        complete_loaded_functions()  # before vLLM warms the model up
        if device.type == "cpu" and self.model_config.enforce_eager:
            torch.compiler.set_stance("force_eager")  # the sampler compiles anyway: 20 s at the first request
        self.update = _VllmUpdate(*reload_of(model, self.model_config), device)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        source: TransferSource = pickle.loads(init_info.source)  # from the process that started this one
        self.update.join(replace(source, receiver=source.receiver + get_tensor_model_parallel_rank()))

    def start_weight_update(self) -> None:
        self.update.start()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        manifest: Manifest = pickle.loads(update_info.manifest)  # from the process that started this one
        self.update.receive(manifest, update_info.timeout_s)

    def finish_weight_update(self) -> None:
        self.update.finish()

    def shutdown(self) -> None:
        self.update.close()


class _VllmUpdate(WorkerUpdate):
    """The `WorkerUpdate` of vLLM's workers."""

    def _decode(self, manifest: Manifest, scope: Scope, sink: WeightSink, timeout_s: float) -> Digest | None:
        with unpinned_nccl_env():  # a group with the trainer may form: VLLM_BATCH_INVARIANT pins variables of NCCL
            return super()._decode(manifest, scope, sink, timeout_s)


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    weight_transfer_engine: AsyncrlWeightTransfer

    def asyncrl_outcome(self) -> list[Any]:
        """The outcome of the last weight update of this worker."""
        return self.weight_transfer_engine.update.outcome()

    def asyncrl_stage(self, source: bytes, manifest: bytes, timeout_s: float) -> None:
        """As `WorkerUpdate.join` and `WorkerUpdate.stage`. `source` as in `InitInfo`, `manifest` as in `UpdateInfo`."""
        engine = self.weight_transfer_engine
        engine.init_transfer_engine(InitInfo(source))
        engine.update.stage(pickle.loads(manifest), timeout_s)  # from the process that started this one

    def asyncrl_staged(self) -> list[Any] | None:
        """As `WorkerUpdate.staged`."""
        return self.weight_transfer_engine.update.staged()

    def asyncrl_forget(self) -> None:
        """As `WorkerUpdate.forget`."""
        self.weight_transfer_engine.update.forget()


WeightTransferEngineFactory.register_engine(BACKEND, AsyncrlWeightTransfer)
