"""Frames between the replica and SGLang's process: a length, then a pickle."""

from __future__ import annotations

import pickle
from typing import Any

SIZE_BYTES = 8


def framed(message: Any) -> bytes:
    frame = pickle.dumps(message, protocol=5)
    return len(frame).to_bytes(SIZE_BYTES, "little") + frame
