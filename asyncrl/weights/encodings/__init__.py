"""Encodings of a publish: `full` weights, `lora` factors to add to the base weights, or `delta` differences to the
previous weights.

One module per encoding defines its tensors; its `check` runs when a manifest is made. `decoder.py` is the receiving
side of all encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import Encoding, TensorSpec
from asyncrl.weights.encodings import delta, lora
from asyncrl.weights.encodings.lora import is_adapter


def _check_full(tensors: Sequence[TensorSpec]) -> None:
    """Encoding `full`: every tensor of the model, with the names and shapes of its checkpoint; no base.

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
"""Encoding -> check that raises WeightTransferError for foreign tensors."""
