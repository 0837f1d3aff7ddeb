"""Memory of tensors that is given back to the device or the system, and taken again in place."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch

from asyncrl.errors import GenerationError, explain


class ReleasedMemory:
    """The storages of tensors whose memory was released. The tensors and views of them, such as the targets of a
    publish, stay valid, and may be read and written again after `restore`.

    On a GPU a storage is empty until then. On a CPU it keeps its addresses, and the system has its pages: parts of
    pages at both ends stay.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool = False) -> None:
        """Releases the memory. Tied tensors share a storage, which counts once.

        Args:
            keep: copy the bytes of a GPU to host memory, and back at `restore`. On a CPU nothing is released then.

        Raises GenerationError: the system does not take the pages.
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
        """Takes the memory again: with the bytes that were kept, or with zeros."""
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
    """Gives the whole pages of this memory to the system; they are 0 when they are used again. The storage cannot be
    shrunk instead: torch forbids that once NumPy has seen it, as in a transfer."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size <= 0:
        return
    libc, advice = ctypes.CDLL(None, use_errno=True), getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice) != 0:
        found = "this system cannot take pages back" if advice is None else os.strerror(ctypes.get_errno())
        asked = f"sleep of the torch engine: {size} bytes back to the system"
        raise GenerationError(explain(asked, found, "set placement=separate"))
