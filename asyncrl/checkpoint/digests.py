"""`files.json`: sizes and digests of a checkpoint's files, which reveal damage before the checkpoint is used."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

FILES = "files.json"
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and XXH3-64 (hex) of one file."""

    bytes: int
    xxh3_64: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Reads the whole file. Raises OSError."""
        return cls(path.stat().st_size, _digest(path))


def seal(directory: Path, written: Mapping[str, FileDigest] | None = None) -> None:
    """Writes `files.json` over all files below `directory`.

    Args:
        written: path below `directory` -> digest made by the process that wrote the file. These files are not read
            again: only their presence and size are checked, as this machine sees them.

    Raises OSError: a file cannot be read or `files.json` cannot be written; a file of `written` is missing or has
    another size.
    """
    found = dict(written or {})
    for name, digest in found.items():
        _check_here(directory / name, name, digest)
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != FILES and name not in found:
            found[name] = FileDigest.of(path)
    (directory / FILES).write_bytes(_render({name: asdict(found[name]) for name in sorted(found)}))


def verify(directory: Path) -> str | None:
    """The damage of the checkpoint in `directory`, by file; None if every byte is as sealed.

    Added files do not count as damage. All sizes are compared before any file is read.
    """
    try:
        text = (directory / FILES).read_bytes()
        listed = json.loads(text)
        if _render(listed) != text:
            return f"{FILES} is not as it was written"
        for name, entry in listed.items():
            if (size := (directory / name).stat().st_size) != entry["bytes"]:
                return f"{name} has {size} bytes of {entry['bytes']}"
        for name, entry in listed.items():
            if _digest(directory / name) != entry["xxh3_64"]:
                return f"{name} has other content than was written"
    except FileNotFoundError as error:
        return f"{_within(directory, error)} is missing"
    except OSError as error:
        return f"{_within(directory, error)} cannot be read: {error.strerror}"
    except (ValueError, TypeError, AttributeError, KeyError):
        return f"{FILES} is not as it was written"
    return None


class Verifier:
    """`verify` with a memory: an intact checkpoint is read again only when sizes or times of its files change. For the
    seconds in which a command starts."""

    def __init__(self) -> None:
        self._intact: dict[Path, list[tuple[str, int, int, int]]] = {}

    def damage(self, directory: Path) -> str | None:
        """As `verify`."""
        try:
            found = _marks(directory)
        except OSError:  # something in it is going, or cannot be looked at
            return verify(directory)
        if directory in self._intact and self._intact[directory] == found:
            return None
        wrong = verify(directory)
        if wrong is None:
            self._intact[directory] = found
        return wrong


def _marks(directory: Path) -> list[tuple[str, int, int, int]]:
    """Path, inode, bytes and time of each file."""
    found = ((path, path.stat()) for path in sorted(directory.rglob("*")))
    return [(str(path), of.st_ino, of.st_size, of.st_mtime_ns) for path, of in found]


def _check_here(path: Path, name: str, digest: FileDigest) -> None:
    try:
        with path.open("rb") as file:  # opening asks a network file system for the present size
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        found = f"a process wrote {name}, and it is not here: its machine does not share this directory"
        raise OSError(error.errno, found, str(path)) from error
    if size != digest.bytes:
        raise OSError(f"{name} has {size} bytes here, and {digest.bytes} where it was written")


def _render(files: Mapping[str, Any]) -> bytes:
    return json.dumps(files, indent=1).encode() + b"\n"


def _digest(path: Path) -> str:
    digest, buffer = xxhash.xxh3_64(), bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def _within(directory: Path, error: OSError) -> str:
    name = Path(str(error.filename))
    return name.relative_to(directory).as_posix() if name.is_relative_to(directory) else str(name)
