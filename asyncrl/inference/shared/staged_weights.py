"""A publish in host memory, beside the model that serves: received while the engine samples, loaded at a pause."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from asyncrl.types import TensorSpec
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.packing import byte_view
from asyncrl.weights.pinned_memory import pinned_empty

_CPU = torch.device("cpu")


class Staging:
    """The tensors of one publish, in memory that is kept for the next one: as much as the weights have, for good."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the model's; for a GPU the memory is pinned."""
        self._device = device
        self._memory: dict[str, torch.Tensor] = {}
        self._whole: dict[str, torch.Tensor] = {}

    def sink(self, check: Callable[[TensorSpec], None]) -> StagingSink:
        """For the next publish: what came before is dropped. `check` as in `CheckedSink`."""
        self._whole.clear()
        return StagingSink(check, AssemblingSink(self._whole.__setitem__, self._take))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of what has come whole, in the order of the publish; valid until the next `sink`."""
        return iter(self._whole.items())

    def exchange(self, name: str, memory: torch.Tensor) -> None:
        """The tensor of this name has gone to somebody who gives this one for the next; it is as large."""
        self._memory[name] = byte_view(memory)

    def _take(self, spec: TensorSpec) -> torch.Tensor:
        memory = self._memory.get(spec.name)
        if memory is None or memory.numel() != spec.nbytes:
            if self._device.type == "cuda":
                memory = pinned_empty((spec.nbytes,), torch.uint8, self._device)
            else:
                memory = torch.empty(spec.nbytes, dtype=torch.uint8)
            self._memory[spec.name] = memory
        return memory


class StagingSink:
    """A `DirectSink` in host memory, wherever the bytes come from. It refuses an unfit tensor before its bytes come."""

    def __init__(self, check: Callable[[TensorSpec], None], inner: AssemblingSink) -> None:
        self._check = check
        self._inner = inner

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        self._check(spec)
        place = self._inner.destination(spec, offset, data.numel(), _CPU)
        place.copy_(data)
        self._inner.wrote(spec, offset, data.numel())

    def destination(self, spec: TensorSpec, offset: int, nbytes: int, device: torch.device) -> torch.Tensor | None:
        self._check(spec)
        return self._inner.destination(spec, offset, nbytes, device) if device.type == "cpu" else None

    def wrote(self, spec: TensorSpec, offset: int, nbytes: int) -> None:
        self._inner.wrote(spec, offset, nbytes)
