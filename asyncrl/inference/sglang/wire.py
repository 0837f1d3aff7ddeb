"""What goes between the replica and SGLang's process: pickled frames, each after its length."""

from __future__ import annotations

import pickle
from typing import Any

SIZE_BYTES = 8


def framed(message: Any) -> bytes:
    frame = pickle.dumps(message, protocol=5)
    return len(frame).to_bytes(SIZE_BYTES, "little") + frame
