"""CPU memory that is kept from one tensor to the next: the kernel clears new memory page by page, which takes several
times as long as a copy."""

from __future__ import annotations

import ctypes
import sys
from threading import Lock
from typing import Any

import torch

LEAST_BYTES = 1 << 20
"""Smaller tensors have memory of their own, which the allocator keeps by itself."""

_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1
_NEVER = 2**31 - 1


class KeptMemory:
    """Lends memory for tensors on the CPU. Threads take it and say which parts of it they have used; `settle` lends
    what was used up again. Memory of which nobody says so stays with its taker. What is kept is, for each size, as much
    as was lent at the same time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._lent: dict[int, tuple[torch.Tensor, dict[int, int]]] = {}
        """By address: the memory, and the lengths of its used parts by their offsets."""

    def take(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8, with any content."""
        if nbytes < LEAST_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            free = self._free.get(nbytes)
            memory = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8)
            self._lent[memory.data_ptr()] = memory, {}
        return memory

    def used(self, tensor: torch.Tensor) -> None:
        """Nobody needs this part of a tensor after the next `settle`. Memory that was not lent is passed over."""
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            if (lent := self._lent.get(address)) is not None and tensor.is_contiguous():
                lent[1][tensor.data_ptr() - address] = tensor.nbytes

    def settle(self) -> None:
        """Lends what was used up again. Called when nobody reads any more what he has used."""
        with self._lock:
            for address, (memory, parts) in list(self._lent.items()):
                if sum(parts.values()) >= memory.nbytes:
                    del self._lent[address]
                    self._free.setdefault(memory.nbytes, []).append(memory)

    def forget_lent(self) -> None:
        """What is lent stays with those who have it."""
        with self._lock:
            self._lent.clear()


def keep_freed_memory() -> None:
    """From now on this process keeps large blocks that it frees for its next ones, where its C library is glibc. Freed
    blocks of 32 MiB went back to the kernel at once."""
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def release_freed_memory() -> None:
    """Gives the kernel what this process has freed until now, where its C library is glibc."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def _glibc(function: str) -> Any:
    """A function of the C library that only glibc has; None: it is another one."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None
