"""Encoding `full`: every tensor of the model, by the names and in the shapes of its checkpoint. It needs no base."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import TensorSpec
from asyncrl.weights.encodings.lora import is_adapter


def check(tensors: Sequence[TensorSpec]) -> None:
    """Raises WeightTransferError: a tensor is an adapter."""
    if adapter := next((spec.name for spec in tensors if is_adapter(spec.name)), None):
        do = "publish with encoding lora"
        raise WeightTransferError(explain(f"publish tensor {adapter} as a weight", "it is an adapter", do))
