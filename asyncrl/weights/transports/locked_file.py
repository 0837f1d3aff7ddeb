"""Files that say whether their owner lives: it holds a lock on them, which the kernel drops however it ends."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path


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
        if path.exists():  # another process may have taken it for abandoned between creation and lock
            return fd, path
        os.close(fd)


def abandoned(directory: Path, prefix: str, suffix: str) -> Iterator[Path]:
    """The files whose owner is dead. While one is yielded nobody else takes it for abandoned; the caller removes it,
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
