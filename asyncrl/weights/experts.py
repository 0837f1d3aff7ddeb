"""Mixtures of experts: models hold the experts of a layer in one tensor, checkpoints have a tensor for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("qwen2_moe", "qwen3_moe")
"""Whose experts lie as `unfused` takes them."""

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def unfused(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the checkpoint, contiguous view of `tensor`) for each tensor that `name` of a model stands for: itself,
    or one per expert and projection.

    Legend: E experts, I width of an expert, H width of the model. Fused are gate and up, [E, 2 I, H], and down,
    [E, H, I].
    """
    if name.endswith(_GATE_UP):
        layer, width = name.removesuffix(".gate_up_proj"), tensor.shape[1] // 2
        for expert, both in enumerate(tensor):
            yield f"{layer}.{expert}.gate_proj.weight", both[:width]
            yield f"{layer}.{expert}.up_proj.weight", both[width:]
    elif name.endswith(_DOWN):
        layer = name.removesuffix(".down_proj")
        for expert, down in enumerate(tensor):
            yield f"{layer}.{expert}.down_proj.weight", down
    else:
        yield name, tensor


def is_fused(name: str) -> bool:
    return name.endswith((_GATE_UP, _DOWN))
