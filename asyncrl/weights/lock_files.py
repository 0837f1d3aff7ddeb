"""Lock files that show whether their owner is alive: the kernel drops the lock however the owner ends.

The next owner, or the run's janitor, finds what a killed owner left behind by its free lock, and removes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
SEGMENT = "asyncrl-weights-", ".seg"
"""Prefix and suffix of a sender's segment in shared memory; its socket has the same name and the suffix `.sock`."""


def create_locked(directory: Path, prefix: str, suffix: str) -> tuple[int, Path]:
    """A new file `<prefix><pid>-<random><suffix>` that this process holds the lock of: the open descriptor, the path.

    Raises OSError: no such directory, no right to write, or a file system without locks.
    """
    while True:
        path = directory / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}{suffix}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        if path.exists():  # another process may have removed it as abandoned between creation and lock
            return fd, path
        os.close(fd)


def abandoned(directory: Path, prefix: str, suffix: str) -> Iterator[Path]:
    """The files whose owner is dead. While one is yielded no other process gets it as abandoned; the caller removes it,
    after what belongs to it."""
    ours = re.compile(re.escape(prefix) + r"\d+-[0-9a-f]{8}" + re.escape(suffix))
    for path in directory.glob(f"{prefix}*{suffix}"):
        if not ours.fullmatch(path.name):
            continue  # a longer prefix
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # removed meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its owner lives
        else:
            yield path
        finally:
            os.close(fd)


def publish_lock() -> tuple[str, str]:
    """Prefix and suffix of the lock beside a sender's directory on disk. Locks of other machines may not be seen from
    here, so the name has this one's."""
    return f"asyncrl-weights-{socket.gethostname()}-", ".lock"


def remove_stale_segments() -> list[Path]:
    """Removes what owners that died left in shared memory; returns the segments removed."""
    removed = []
    for path in abandoned(SHARED_MEMORY, *SEGMENT):
        path.with_suffix(".sock").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        removed.append(path)
        logger.info("removed shared memory of a dead weight sender: %s", path)
    return removed


def remove_stale_publishes(root: Path) -> list[Path]:
    """Removes what owners on this machine that died left below `root`; returns the directories removed."""
    removed = []
    for lock in abandoned(root, *publish_lock()):
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink(missing_ok=True)
        removed.append(lock.with_suffix(""))
        logger.info("removed what a dead weight sender left on disk: %s", lock.with_suffix(""))
    return removed
