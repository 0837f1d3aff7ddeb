"""Encoding `delta`: what has changed since the last publish, lossless.

Sent is `<weight>.delta` [n] uint8 for every weight, in the order of the model: the bytes that `difference.py` makes of
the weight before and now, none for one that has not changed. The base is known by its digest (`Manifest.base_digest`):
the trainer sends differences only to replicas that have committed the weights of that digest, and a replica refuses
them unless its own copy has it. All others get all weights, and keep a copy (`Manifest.is_kept`).
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import TensorSpec

DELTA = ".delta"


def weight_of(name: str) -> str:
    """The weight that the difference of this name changes."""
    return name.removesuffix(DELTA)


def check(tensors: Sequence[TensorSpec]) -> None:
    """Raises WeightTransferError: these tensors are not differences."""
    for spec in tensors:
        if not spec.name.endswith(DELTA) or spec.dtype != "uint8" or len(spec.shape) != 1:
            asked = f"publish tensor {spec.name} {spec.shape} {spec.dtype} as a difference"
            do = "send what DeltaEncoder.encode returns, or publish with encoding full"
            raise WeightTransferError(explain(asked, f"it is not [n] uint8 named <weight>{DELTA}", do))
