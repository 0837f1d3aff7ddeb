"""Encodings of a publish: its tensors are the weights themselves, or small ones to add to weights that a replica has.

One module per encoding says how its tensors are named (`check`, called when a manifest is made) and what they become.
`decoder.py` is the receiving side of all encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.types import Encoding, TensorSpec
from asyncrl.weights.encodings import full, lora

CHECKS: dict[Encoding, Callable[[Sequence[TensorSpec]], None]] = {"full": full.check, "lora": lora.check}
"""Encoding -> function that raises WeightTransferError for tensors that do not belong to it."""
BASE_VERSIONS: dict[Encoding, int | None] = {"full": None, "lora": 0}
"""Encoding -> `Manifest.base_version`. Version 0 are the model's own files."""
