"""Memory of tensors that is given back to the device or the system, and taken again in place."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from asyncrl.errors import GenerationError, explain


class ReleasedMemory:
    """The storages of tensors that were released. Views of these tensors, such as the targets of a publish, stay valid:
    they point to the same storages, which are empty until `restore`."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool = False) -> None:
        """Releases the memory. Tied tensors share a storage, which counts once.

        Args:
            keep: copy the bytes to host memory, and back at `restore`. On a CPU the bytes stay where they are.

        Raises GenerationError: memory that belongs to a file or another library cannot be released.
        """
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._storages = [s for s in found.values() if s.nbytes() and not (keep and s.device.type == "cpu")]
        self._bytes = [storage.nbytes() for storage in self._storages]
        if not all(storage.resizable() for storage in self._storages):
            found = "the memory of a weight belongs to a file or another library"
            raise GenerationError(explain("sleep of the torch engine", found, "start it without real weights"))
        self._kept = [_view(storage).cpu() for storage in self._storages] if keep else []
        for storage in self._storages:
            storage.resize_(0)
        _give_back({storage.device.type for storage in self._storages})

    @property
    def nbytes(self) -> int:
        """Bytes that were released."""
        return sum(self._bytes)

    def restore(self) -> None:
        """Takes the memory again: with the bytes that were kept, or with zeros."""
        for index, (storage, nbytes) in enumerate(zip(self._storages, self._bytes, strict=True)):
            storage.resize_(nbytes)
            if self._kept:
                _view(storage).copy_(self._kept[index])
            else:
                _view(storage).zero_()
        self._kept = []


def _view(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, [nbytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _give_back(devices: set[str]) -> None:
    """Frees what allocators keep for later: other processes need it now."""
    if "cuda" in devices:
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if "cpu" in devices and trim is not None:
        trim(0)
