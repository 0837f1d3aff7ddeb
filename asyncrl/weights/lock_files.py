"""Lock files that show whether their owner is alive: the kernel drops the lock however the owner exits.

A free lock marks leftovers of a killed owner; the next owner or the run's janitor removes them.
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
    """Creates and locks `<prefix><pid>-<random><suffix>`; returns the open descriptor and the path.

    Raises OSError: no such directory, no write permission, or a file system without locks.
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
    """Yields the lock files of dead owners, locked until the next iteration. The caller deletes the data first and the
    lock file last."""
    ours = re.compile(re.escape(prefix) + r"\d+-[0-9a-f]{8}" + re.escape(suffix))
    for path in directory.glob(f"{prefix}*{suffix}"):
        if not ours.fullmatch(path.name):
            continue  # a longer prefix
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # already removed, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its owner lives
        else:
            yield path
        finally:
            os.close(fd)


def publish_lock() -> tuple[str, str]:
    """Prefix and suffix of the lock of a sender's directory on disk. The prefix names this machine, because locks of
    other machines may not be visible here."""
    return f"asyncrl-weights-{socket.gethostname()}-", ".lock"


def remove_stale_segments() -> None:
    """Removes the shared memory of dead senders."""
    for path in abandoned(SHARED_MEMORY, *SEGMENT):
        path.with_suffix(".sock").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        logger.info("removed shared memory of a dead weight sender: %s", path)


def remove_stale_publishes(root: Path) -> None:
    """Removes the directories of this machine's dead senders below `root`."""
    for lock in abandoned(root, *publish_lock()):
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        # The lock goes last: until then nobody else can claim the directory.
        lock.unlink(missing_ok=True)
        logger.info("removed what a dead weight sender left on disk: %s", lock.with_suffix(""))
