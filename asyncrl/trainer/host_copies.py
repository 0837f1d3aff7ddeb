"""Copies in host memory of what a rank trains, from which checkpoints are written and weights are sent meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from asyncrl.weights.pinned_memory import pinned_empty


class HostCopies:
    """Makes copies, and keeps the memory of one that is no longer needed for the next: writing to fresh pages costs as
    much as the copy itself.

    A copy belongs to whoever asked for it until it is given back, so the memory of a checkpoint that is still being
    written is never touched: the next copy takes memory of its own. At most one copy is kept beside those in use.
    Methods may be called from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, live: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Copies of the tensors in host memory, under their names; takes one at a time. A shard stays a DTensor, which
        knows its place in the whole; nothing is gathered. Tensors of another shape, dtype or placement than before get
        new memory, pinned beside a GPU: all copies then run at the speed of the bus, and are waited for once."""
        with self._lock:
            kept, self._kept = self._kept, {}
        copies: dict[str, torch.Tensor] = {}
        devices: set[torch.device] = set()
        for name, tensor in live:
            copies[name] = _copied(tensor, kept.pop(name, None))
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return copies

    def give_back(self, copies: dict[str, torch.Tensor]) -> None:
        """Ends the use of what `copy` returned. The next `copy` overwrites its tensors and empties the dict."""
        with self._lock:
            self._kept = copies


def _copied(tensor: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """A copy, in the memory of `kept` where that fits."""
    if kept is None or not _agree(tensor, kept):
        copy = tensor.to("cpu", copy=True)
        return _pinned(copy, tensor.device) if tensor.is_cuda else copy
    _local(kept).copy_(_local(tensor), non_blocking=True)
    return kept


def _pinned(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
    local = _local(copy)
    pinned = pinned_empty(local.shape, local.dtype, device).copy_(local)
    if isinstance(copy, DTensor):
        copy._local_tensor = pinned
        return copy
    return pinned


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, DTensor) != isinstance(other, DTensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor) and one.placements != other.placements:
        return False
    return _local(one).shape == _local(other).shape


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
