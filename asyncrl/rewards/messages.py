"""What a reward process answers. A frame is its length in 4 bytes, little-endian, and a pickle."""

from __future__ import annotations

import struct
from dataclasses import dataclass

LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Ready:
    """The reward was built; answers the first frame."""


@dataclass(frozen=True, slots=True)
class Scored:
    reward: float
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Raised:
    """`error`: the exception, pickled; None when it cannot be, or is none that may pass on (SystemExit, say)."""

    error: bytes | None
    summary: str
    trace: str


Answer = Ready | Scored | Raised
