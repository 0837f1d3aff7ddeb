"""Optimizer state that is in host memory between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from asyncrl.weights.pinned_memory import pinned_empty


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where the optimizer looks for one tensor of its state."""

    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


class HostState:
    """The tensors of some slots: in buffers of host memory, or on their device. Owns the buffers, which are allocated
    once and pinned beside a GPU. On a CPU the two places are different memory as well, so that the tests see the moves.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        """Moves them to the host."""
        self._slots = [(slot, slot.read().device, _buffer_like(slot.read())) for slot in slots]
        self._on_device = True
        self.to_host()

    def to_device(self) -> None:
        """Idempotent."""
        if self._on_device:
            return
        for slot, device, buffer in self._slots:
            slot.write(buffer.to(device, non_blocking=True, copy=True))
        self._on_device = True

    def to_host(self) -> None:
        """Returns when the device's memory is free. Idempotent."""
        if not self._on_device:
            return
        for slot, _, buffer in self._slots:
            buffer.copy_(slot.read(), non_blocking=True)
        for device in {device for _, device, _ in self._slots if device.type == "cuda"}:
            torch.cuda.synchronize(device)  # the copies are done before anything reads a buffer
        for slot, _, buffer in self._slots:
            slot.write(buffer)
        self._on_device = False


def _buffer_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cuda":
        return pinned_empty(tensor.shape, tensor.dtype, tensor.device)
    return torch.empty(tensor.shape, dtype=tensor.dtype)
