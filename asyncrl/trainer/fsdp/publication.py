"""The tensors of a publish: the whole policy in the replicas' dtype, with each expert apart as in a checkpoint, or only
its adapters.

Adapters are sent in float32, since they are small. `lora_B` is multiplied by alpha / rank beforehand, so that a replica
computes W = W_0 + B A without knowing the scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from asyncrl.trainer.fsdp import lora, sharded_state
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import TensorSpec
from asyncrl.weights.encodings.lora import LORA_B
from asyncrl.weights.experts import unfused


class Publication:
    def __init__(self, model: PreTrainedModel, spec: TrainerSpec, device: torch.device) -> None:
        self._model, self._device = model, device
        self._scale = lora.scale_of(spec.trainer.lora) if spec.trainer.lora.rank else None
        self._dtype_name = spec.model.inference_dtype if self._scale is None else "float32"
        self._dtype: torch.dtype = getattr(torch, self._dtype_name)

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name, tuple(part.shape), self._dtype_name, part.numel() * self._dtype.itemsize)
            for fused, tensor in sharded_state.published_tensors(self._model)
            for name, part in unfused(fused, torch.empty(tensor.shape, device="meta"))
        )

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective: every rank must exhaust the iterator."""
        for name, tensor in sharded_state.published_tensors(self._model):
            # cast before gathering, half the bytes for 16-bit replicas; on the device, whose group is NCCL's
            whole = sharded_state.full(tensor.to(self._device, self._dtype)).detach()
            if self._scale is not None and name.endswith(LORA_B):
                whole = whole * self._scale
            yield from unfused(name, whole)
