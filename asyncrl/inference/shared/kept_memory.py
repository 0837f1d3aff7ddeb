"""CPU memory that is kept from one tensor to the next: the kernel clears new memory page by page, which takes several
times as long as a copy."""

from __future__ import annotations

import ctypes
import sys
from threading import Lock

import torch

LEAST_BYTES = 1 << 20
"""Smaller tensors have memory of their own, which the allocator keeps by itself."""

_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1
_NEVER = 2**31 - 1


class KeptMemory:
    """Lends memory for tensors on the CPU, and lends it again once all bytes of a tensor were used.

    For any number of threads. Memory whose use nobody reports is its taker's alone. What is kept is, for each size, as
    much as was lent at the same time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._lent: dict[int, tuple[torch.Tensor, list[int]]] = {}
        """By address: the memory, and how many of its bytes were not used yet."""

    def take(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8, with any content."""
        if nbytes < LEAST_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            free = self._free.get(nbytes)
            memory = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8)
            self._lent[memory.data_ptr()] = memory, [nbytes]
        return memory

    def used(self, tensor: torch.Tensor) -> None:
        """This part of a tensor is not needed any more. Other memory than that which was lent is passed over."""
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            if (lent := self._lent.get(address)) is None:
                return
            memory, left = lent
            left[0] -= tensor.nbytes
            if left[0] <= 0:
                del self._lent[address]
                self._free.setdefault(memory.nbytes, []).append(memory)

    def forget_lent(self) -> None:
        """What is lent stays with those who have it."""
        with self._lock:
            self._lent.clear()


def keep_freed_memory() -> None:
    """From now on this process keeps large blocks that it frees for its next ones, where its C library is glibc. Freed
    blocks of 32 MiB went back to the kernel at once."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
