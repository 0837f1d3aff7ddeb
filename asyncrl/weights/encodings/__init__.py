"""Encodings of a publish: its tensors are the weights themselves, small ones to add to weights that a replica has, or
differences to the weights that it got before.

One module per encoding says how its tensors are named (`check`, called when a manifest is made) and what they become.
`decoder.py` is the receiving side of all encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import Encoding, TensorSpec
from asyncrl.weights.encodings import delta, lora
from asyncrl.weights.encodings.lora import is_adapter


def _check_full(tensors: Sequence[TensorSpec]) -> None:
    """Encoding `full`: every tensor of the model, by the names and in the shapes of its checkpoint. It needs no base.

    Raises WeightTransferError: a tensor is an adapter.
    """
    if adapter := next((spec.name for spec in tensors if is_adapter(spec.name)), None):
        do = "publish with encoding lora"
        raise WeightTransferError(explain(f"publish tensor {adapter} as a weight", "it is an adapter", do))


CHECKS: dict[Encoding, Callable[[Sequence[TensorSpec]], None]] = {
    "full": _check_full,
    "lora": lora.check,
    "delta": delta.check,
}
"""Encoding -> function that raises WeightTransferError for tensors that do not belong to it."""
BASE_VERSIONS: dict[Encoding, int | None] = {"full": None, "lora": 0, "delta": None}
"""Encoding -> `Manifest.base_version`. Version 0 are the model's own files; a delta knows its base by the digest."""
