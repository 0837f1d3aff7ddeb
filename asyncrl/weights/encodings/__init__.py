"""What the tensors of a publish are: the weights themselves, or something small to add to weights that a replica holds.

One module per encoding says how its tensors are named (`check`, asked where a manifest is made) and what they become.
`decoder.py` is the receiving side of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.types import Encoding, TensorSpec
from asyncrl.weights.encodings import full, lora

CHECKS: dict[Encoding, Callable[[Sequence[TensorSpec]], None]] = {"full": full.check, "lora": lora.check}
"""Encoding -> raises WeightTransferError for tensors that are none of that encoding."""
BASE_VERSIONS: dict[Encoding, int | None] = {"full": None, "lora": 0}
"""Encoding -> `Manifest.base_version`. Version 0 are the model's own files."""
