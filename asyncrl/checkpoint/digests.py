"""`files.json`: sizes and digests of the files of a checkpoint, which show damage before the checkpoint is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

FILES = "files.json"
_CHUNK_BYTES = 4 << 20


def seal(directory: Path) -> None:
    """Writes `files.json` over all files below `directory`, each with its size in bytes and its XXH3-64 in hex.

    Raises OSError: a file cannot be read, or this one written.
    """
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path != directory / FILES:
            found[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size, "xxh3_64": _digest(path)}
    (directory / FILES).write_bytes(_render(found))


def verify(directory: Path) -> str | None:
    """The damage of the checkpoint in `directory`, by file; None when every byte is as it was sealed.

    Added files do not count as damage. Sizes are compared before anything is read.
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
