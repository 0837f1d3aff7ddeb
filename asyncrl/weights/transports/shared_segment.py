"""A named piece of POSIX shared memory that one process owns and others map.

`multiprocessing.shared_memory` is not used: before Python 3.13 its resource tracker unlinks a segment when an attached
process exits. Here the owner locks the file while it lives (`weights/lock_files.py`); the next owner on the machine
removes files without a lock.
"""

from __future__ import annotations

import mmap
import os

import torch

from asyncrl.errors import ConfigError, TransferEnded, explain
from asyncrl.weights.lock_files import SEGMENT, SHARED_MEMORY, create_locked, remove_stale_segments


class SharedSegment:
    """The owner's side: a file in shared memory, mapped, and the path of a socket that shares its name and fate."""

    def __init__(self) -> None:
        """Creates only the file. Raises ConfigError: no POSIX shared memory here."""
        if not SHARED_MEMORY.is_dir():
            do = "set weights.transport=collective"
            raise ConfigError(explain("shared memory for weights", f"no {SHARED_MEMORY}", do))
        remove_stale_segments()
        self.data = torch.empty(0, dtype=torch.uint8)
        """[nbytes] uint8, shared; empty before `reserve`."""
        self._fd, self.path = create_locked(SHARED_MEMORY, *SEGMENT)
        self.socket_path = self.path.with_suffix(".sock")

    def reserve(self, nbytes: int) -> None:
        """Allocates and maps the memory; idempotent. Raises ConfigError: there is not enough."""
        if self.data.numel() == nbytes:
            return
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            os.ftruncate(self._fd, 0)  # release the partial allocation
            asked, found = f"{nbytes} bytes of shared memory for weights", f"{SHARED_MEMORY}: {error.strerror}"
            do = "enlarge it (docker: --shm-size) or lower weights.bucket_bytes"
            raise ConfigError(explain(asked, found, do)) from error
        self.data = _map(self._fd, nbytes)

    def close(self) -> None:
        """Removes the file and the socket; the memory is freed with its last view. Idempotent."""
        if self._fd < 0:
            return
        self.socket_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
        self.data = torch.empty(0, dtype=torch.uint8)


def attach(path: str) -> torch.Tensor:
    """[nbytes] uint8: another process's segment at its present size. Unmapped with its last view.

    Raises:
        TransferEnded: the segment is gone.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        do = "form a new transfer group and give receivers its source"
        raise TransferEnded(explain(f"attach to weights at {path}", "its sender is gone", do)) from error
    try:
        nbytes = os.fstat(fd).st_size
        return _map(fd, nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 over a shared mapping; the tensor keeps the mapping alive."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(mmap.mmap(fd, nbytes, flags=flags), dtype=torch.uint8)
