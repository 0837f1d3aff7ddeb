"""Encoding `delta`: the lossless changes since the last publish.

A publish has `<weight>.delta` [n] uint8 for every weight, in model order: `difference.encode(old, new)`, empty if
unchanged. The base is identified by digest (`Manifest.base_digest`): the trainer sends differences only to replicas
that committed it, and a replica refuses them if its copy differs. Other replicas get all weights and keep a copy
(`Manifest.is_kept`).
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import TensorSpec

DELTA = ".delta"


def weight_of(name: str) -> str:
    """The name of the weight that a difference changes."""
    return name.removesuffix(DELTA)


def check(tensors: Sequence[TensorSpec]) -> None:
    """Raises WeightTransferError: these tensors are not differences."""
    for spec in tensors:
        if not spec.name.endswith(DELTA) or spec.dtype != "uint8" or len(spec.shape) != 1:
            asked = f"publish tensor {spec.name} {spec.shape} {spec.dtype} as a difference"
            do = "send what DeltaEncoder.encode returns, or publish with encoding full"
            raise WeightTransferError(explain(asked, f"it is not [n] uint8 named <weight>{DELTA}", do))
