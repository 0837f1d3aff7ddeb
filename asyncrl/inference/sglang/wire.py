"""What goes between the replica and SGLang's process: pickled frames, each after its length."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

SIZE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Output:
    """What SGLang has sampled of one request since the last output.

    Attributes:
        ids: [n] int32.
        logprobs: [n] float32.
        reason: stop, length or abort on the last output; None before.
        spans: (version, index of its first response token) of the whole response, on the last output of an SGLang that
            knows them.
        error: why SGLang ended the request, if it refused it.
    """

    rid: str
    ids: np.ndarray
    logprobs: np.ndarray
    reason: str | None = None
    spans: tuple[tuple[str, int], ...] | None = None
    cached_tokens: int = 0
    error: str = ""


def framed(message: Any) -> bytes:
    frame = pickle.dumps(message, protocol=5)
    return len(frame).to_bytes(SIZE_BYTES, "little") + frame
