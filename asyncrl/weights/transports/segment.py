"""A named piece of POSIX shared memory that one process owns and others map.

`multiprocessing.shared_memory` is not used: before Python 3.13 its resource tracker unlinks a segment when a process
that only attached to it exits. Here the owner holds a lock on the file for as long as it lives, and the kernel drops
the lock however the owner ends: a file without a lock is left over, and the next owner on the machine removes it.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
from pathlib import Path

import torch

from asyncrl.errors import ConfigError, WeightTransferError, explain

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "asyncrl-weights-"


class Segment:
    """The owner's side: a file in shared memory, mapped, and the path of a socket that shares its name and fate."""

    def __init__(self, nbytes: int) -> None:
        """Raises ConfigError: there is no POSIX shared memory here, or not enough of it."""
        if not SHARED_MEMORY.is_dir():
            raise ConfigError(
                explain("shared memory for weights", f"no {SHARED_MEMORY}", "set weights.transport=collective")
            )
        remove_stale_segments()
        self._fd, self.path = _create_locked()
        self.socket_path = self.path.with_suffix(".sock")
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            self.close()
            raise ConfigError(
                explain(
                    f"{nbytes} bytes of shared memory for weights",
                    f"{SHARED_MEMORY}: {error.strerror}",
                    "enlarge it (docker: --shm-size) or lower weights.bucket_bytes",
                )
            ) from error
        self.data = _map(self._fd, nbytes)
        """[nbytes] uint8, shared."""

    def close(self) -> None:
        """Removes the file and the socket; the memory goes when the last view of it does. Idempotent."""
        if self._fd < 0:
            return
        self.socket_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
        self.data = torch.empty(0, dtype=torch.uint8)


def attach(path: str) -> torch.Tensor:
    """[nbytes] uint8: another process's segment, whole. Unmapped when the last view of it is gone.

    Raises:
        WeightTransferError: the segment is gone.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        do = "form the transfer group anew and give receivers its new source"
        raise WeightTransferError(explain(f"attach to weights at {path}", "its sender is gone", do)) from error
    try:
        return _map(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def remove_stale_segments() -> list[Path]:
    """Removes what owners that died left in shared memory; returns the segments removed."""
    removed = []
    for path in SHARED_MEMORY.glob(f"{_PREFIX}*.seg"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # removed meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.with_suffix(".sock").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            removed.append(path)
            logger.info("removed shared memory of a dead weight sender: %s", path)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed


def _create_locked() -> tuple[int, Path]:
    """A new file that this process holds the lock of. Another process may take it for stale between its creation and
    the lock, hence the second look at the path."""
    while True:
        path = SHARED_MEMORY / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}.seg"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if path.exists():
            return fd, path
        os.close(fd)


def _map(fd: int, nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 over a shared mapping; the tensor keeps the mapping alive."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(mmap.mmap(fd, nbytes, flags=flags), dtype=torch.uint8)
