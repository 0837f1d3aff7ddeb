"""vLLM's backend nccl with gloo for its wire: a server and a trainer without GPUs make all of its other steps.

`Extension` is the value of the server's `--worker-extension-cls`, whose import puts the wire in place."""

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from asyncrl.weights.packing import byte_view
from asyncrl.weights.transports.collective import _OfReplicas
from asyncrl.weights.transports.control_channel import Deadline
from asyncrl.weights.transports.process_group import BroadcastGroup, join_store

TIMEOUT_S = 30.0
CPU = torch.device("cpu")


class Extension:
    """Adds nothing to the worker."""


class _Receives(NCCLWeightTransferEngine):
    """In the server's worker: vLLM's infos, reload and session; gloo instead of NCCL."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        assert (init_info.packed, init_info.packed_num_buffers) == (True, 2)
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        deadline = Deadline(TIMEOUT_S)
        store = join_store(f"{init_info.master_address}:{init_info.master_port}", deadline)
        self._group = BroadcastGroup(store, 1, rank, init_info.world_size, CPU)
        self._group.form(deadline, lambda: None)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            _broadcast(self._group, tensor)
            self.model.load_weights([(name, tensor)])

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # vLLM's waits for an accelerator then

    def shutdown(self) -> None:
        if (group := self.__dict__.pop("_group", None)) is not None:
            group.close()


# A registered name cannot be registered again, and the server must say that its backend is nccl.
WeightTransferEngineFactory._registry["nccl"] = lambda: _Receives


class _Sends(NCCLTrainerWeightTransferEngine):
    """In the trainer: vLLM's order of calls and its checks of the source."""

    def _broadcast(self, source: Any, meta: Any) -> None:
        for _, tensor in self._checked_iter(source, meta):
            _broadcast(self.model_update_group, tensor)

    def shutdown(self) -> None:
        self.model_update_group.close()


def join_gloo(host: str, port: int, world_size: int, buffer_bytes: int, weights: Any) -> _Sends:
    """In place of `join_vllm`."""
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    engine = _Sends(client=_OfReplicas(), source=weights)
    engine.model_update_group = BroadcastGroup(store, 1, 0, world_size, CPU)
    engine.model_update_group.form(Deadline(TIMEOUT_S), lambda: None)
    return engine


def _broadcast(group: BroadcastGroup, tensor: torch.Tensor) -> None:
    deadline = Deadline(TIMEOUT_S)
    group.start(byte_view(tensor), deadline)
    group.wait(deadline, "broadcast a tensor", lambda: None)
