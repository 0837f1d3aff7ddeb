"""Encodings of a publish: its tensors are the weights themselves, small ones to add to weights that a replica has, or
differences to the weights that it got before.

One module per encoding says how its tensors are named (`check`, called when a manifest is made) and what they become.
`decoder.py` is the receiving side of all encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.types import Encoding, TensorSpec
from asyncrl.weights.encodings import delta, full, lora

CHECKS: dict[Encoding, Callable[[Sequence[TensorSpec]], None]] = {
    "full": full.check,
    "lora": lora.check,
    "delta": delta.check,
}
"""Encoding -> function that raises WeightTransferError for tensors that do not belong to it."""
BASE_VERSIONS: dict[Encoding, int | None] = {"full": None, "lora": 0, "delta": None}
"""Encoding -> `Manifest.base_version`. Version 0 are the model's own files; a delta knows its base by the digest."""
