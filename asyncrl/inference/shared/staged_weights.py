"""A publish in host memory: received while the engine samples, loaded at a pause."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from asyncrl.types import TensorSpec
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.packing import byte_view
from asyncrl.weights.pinned_memory import pinned_empty


class Staging:
    """The tensors of one publish. The buffers are reused by later publishes and permanently take as much memory as the
    weights."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the model's; buffers for a GPU are pinned."""
        self._device = device
        self._memory: dict[str, torch.Tensor] = {}
        self._whole: dict[str, torch.Tensor] = {}

    def sink(self, check: Callable[[TensorSpec], None]) -> AssemblingSink:
        """Sink of the next publish; drops the previous one. `check` as in `AssemblingSink`."""
        self._whole.clear()
        return AssemblingSink(self._whole.__setitem__, check=check, take=self._take)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of each complete tensor, in the order of the publish; valid until the next `sink`."""
        return iter(self._whole.items())

    def exchange(self, name: str, memory: torch.Tensor) -> None:
        """The caller keeps the staged tensor `name` and gives `memory`, of the same size, as buffer of the next
        publish."""
        self._memory[name] = byte_view(memory)

    def _take(self, spec: TensorSpec) -> torch.Tensor:
        memory = self._memory.get(spec.name)
        if memory is None or memory.numel() != spec.nbytes:
            memory = self._memory[spec.name] = pinned_empty((spec.nbytes,), torch.uint8, self._device)
        return memory
