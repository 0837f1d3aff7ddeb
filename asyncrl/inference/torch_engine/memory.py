"""Releases the memory of tensors to the device or the system, and reallocates it in place."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch

from asyncrl.errors import GenerationError, explain


class ReleasedMemory:
    """The storages of tensors whose memory was released. The tensors and their views, such as the targets of a publish,
    stay valid and can be used again after `restore`.

    On a GPU the storage is resized to 0 until then. On a CPU it keeps its addresses and gives up its whole pages;
    partial pages at both ends stay.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool = False) -> None:
        """Releases the memory. A storage shared by tied tensors counts once.

        Args:
            keep: copy GPU bytes to host memory, and back at `restore`. On a CPU nothing is then released.

        Raises GenerationError: the system cannot take pages back.
        """
        found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages = [s for s in found.values() if s.nbytes() and not (keep and s.device.type == "cpu")]
        self._bytes = [storage.nbytes() for storage in self._storages]
        self._kept = [_view(storage).cpu() for storage in self._storages] if keep else []
        for storage in self._storages:
            if storage.device.type == "cpu":
                _give_pages(storage.data_ptr(), storage.nbytes())
            else:
                storage.resize_(0)
        if any(storage.device.type == "cuda" for storage in self._storages):
            torch.cuda.empty_cache()

    @property
    def nbytes(self) -> int:
        """Bytes that were released."""
        return sum(self._bytes)

    def restore(self) -> None:
        """Reallocates the memory, with the kept bytes or zeros."""
        for index, (storage, nbytes) in enumerate(zip(self._storages, self._bytes, strict=True)):
            if storage.device.type != "cpu":
                storage.resize_(nbytes)
            if self._kept:
                _view(storage).copy_(self._kept[index])
            else:
                _view(storage).zero_()
        self._kept = []


def _view(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, [nbytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _give_pages(address: int, nbytes: int) -> None:
    """Returns the whole pages of this memory to the system; they read as 0 afterwards. Shrinking the storage is
    impossible: torch forbids it once NumPy has seen the storage, as in a transfer."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size <= 0:
        return
    libc, advice = ctypes.CDLL(None, use_errno=True), getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice) != 0:
        found = "this system cannot take pages back" if advice is None else os.strerror(ctypes.get_errno())
        asked = f"sleep of the torch engine: {size} bytes back to the system"
        raise GenerationError(explain(asked, found, "set placement=separate"))
