"""Pinned host memory: a GPU copies to and from it asynchronously, at the speed of the bus.

torch's own allocator of pinned memory rounds each request up to a power of two: the shards of a model would take up to
twice their size.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch

logger = logging.getLogger(__name__)


class _Pages(mmap.mmap):
    """Memory that is pinned until its last tensor is gone."""

    pinned_at = 0

    def __del__(self) -> None:
        if self.pinned_at:
            with suppress(Exception):  # CUDA may be unloaded at interpreter exit
                _cuda().cudaHostUnregister(self.pinned_at)


def pinned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor in host memory, not initialised; pinned if `device`, the other end of its copies, is a GPU."""
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes or device.type != "cuda":
        return torch.empty(shape, dtype=dtype)
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = torch.frombuffer(pages, dtype=torch.uint8)
    if pin(data, device):
        pages.pinned_at = data.data_ptr()
    return data.view(dtype).view(tuple(shape))


def pin(data: torch.Tensor, device: torch.device) -> bool:
    """Pins existing memory, [n] uint8, until `unpin`. False: the driver refused; copies are slower."""
    with torch.cuda.device(device):
        error = int(_cuda().cudaHostRegister(data.data_ptr(), data.numel(), 0))
        if error:
            logger.warning("%d bytes are not pinned: cudaHostRegister returned %d", data.numel(), error)
            with suppress(RuntimeError, AssertionError):
                torch.zeros(1, device=device)  # CUDA reports the error once more, at the next kernel
    return not error


def unpin(data: torch.Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        _cuda().cudaHostUnregister(data.data_ptr())


def _cuda() -> Any:
    return torch.cuda.cudart()
