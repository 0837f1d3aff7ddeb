"""What a tool process and its owner say. A frame is its length in 4 bytes, little-endian, and a pickle."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.environments import ToolUseConfig

LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Start:
    """The first frame: `path` is `sys.path` of the owner. Answered by a `ToolResult`."""

    path: tuple[str, ...]
    config: ToolUseConfig


@dataclass(frozen=True, slots=True)
class CallFrame:
    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the policy reads. `failed`: it is an error."""

    text: str
    failed: bool = False


def packed(value: object) -> bytes:
    frame = pickle.dumps(value)
    return LENGTH.pack(len(frame)) + frame
