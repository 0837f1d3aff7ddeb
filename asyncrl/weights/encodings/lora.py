"""Encoding `lora`: pairs of low-rank factors, W = W_0 + B A.

Sent are `<layer>.lora_A.weight` [rank, in] and `<layer>.lora_B.weight` [out, rank], float32, the latter scaled already.
W_0 is version 0, the model's own files, at every publish: nothing drifts however often the weights change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import TensorSpec

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


def is_adapter(name: str) -> bool:
    return name.endswith((LORA_A, LORA_B))


def _stem(name: str) -> str:
    return name.removesuffix(LORA_A).removesuffix(LORA_B)


def adapted(names: Iterable[str]) -> frozenset[str]:
    """The weights that the adapters of these names change."""
    return frozenset(_stem(name) + ".weight" for name in names if is_adapter(name))


def check(tensors: Sequence[TensorSpec]) -> None:
    """Raises WeightTransferError: these tensors are not the pairs of adapters."""
    shapes = {spec.name: spec.shape for spec in tensors}
    for spec in tensors:
        asked, do = f"publish tensor {spec.name} {spec.shape} {spec.dtype} as an adapter", "send both factors, float32"
        if not is_adapter(spec.name) or spec.dtype != "float32" or len(spec.shape) != 2:
            raise WeightTransferError(explain(asked, "it is no factor [rank, in] or [out, rank] in float32", do))
        stem = _stem(spec.name)
        a, b = shapes.get(stem + LORA_A), shapes.get(stem + LORA_B)
        if a is None or b is None or len(a) != 2 or a[0] != b[-1]:
            found = f"lora_A of {stem} has shape {a}, lora_B {b}"
            raise WeightTransferError(explain(asked, found, do))
