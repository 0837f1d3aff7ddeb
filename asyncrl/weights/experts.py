"""Mixtures of experts: a model fuses the experts of a layer into one tensor, a checkpoint has a tensor per expert."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("qwen2_moe", "qwen3_moe")
"""Model types whose experts are laid out as `unfused` expects."""

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def routers_of(model: Any) -> list[Any]:
    """The routers of a Hugging Face model in layer order; empty unless its type is in `MODEL_TYPES`. A router returns
    logits [tokens, E], weights of the chosen experts [tokens, k], and their indices [tokens, k] int64."""
    if model.config.model_type not in MODEL_TYPES:
        return []
    return [layer.mlp.gate for layer in model.base_model.layers if hasattr(layer.mlp, "experts")]


def unfused(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the checkpoint, contiguous view of `tensor`): one pair per expert and projection of a fused tensor, the
    tensor itself otherwise.

    Legend: E experts, I width of an expert, H width of the model. Fused tensors: gate and up [E, 2 I, H], down [E, H,
    I].
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


@dataclass(frozen=True, slots=True)
class FusedParts:
    """The checkpoint tensors that make up one model tensor, in its order. Fused: one row per expert, of one or two
    names. Otherwise one row of one name."""

    rows: tuple[tuple[str, ...], ...]
    is_fused: bool

    @property
    def names(self) -> list[str]:
        return [name for row in self.rows for name in row]

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of the model's tensor, given the shapes of the parts."""
        first = shapes[self.rows[0][0]]
        return (len(self.rows), first[0] * len(self.rows[0]), *first[1:]) if self.is_fused else first

    def joined(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The model's tensor; `read` returns a part by name."""
        import torch

        if not self.is_fused:
            return read(self.rows[0][0])
        return torch.stack([torch.cat([read(name) for name in row]) for row in self.rows])


def fused_parts(names: Iterable[str]) -> dict[str, FusedParts]:
    """Name in the model -> its parts among the checkpoint's `names`: the inverse of `unfused`."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    whole: dict[str, FusedParts] = {}
    for name in names:
        if matched := _OF_EXPERT.fullmatch(name):
            place, expert, part = matched.groups()
            fused = f"{place}.down_proj" if part == "down" else f"{place}.gate_up_proj"
            found.setdefault(fused, {}).setdefault(int(expert), {})[part] = name
        else:
            whole[name] = FusedParts(((name,),), is_fused=False)
    # Experts may come in any order (sharded checkpoints); the fused tensor has them by number.
    for fused, experts in found.items():
        rows = (
            tuple(row[part] for part in ("gate", "up", "down") if part in row) for _, row in sorted(experts.items())
        )
        whole[fused] = FusedParts(tuple(rows), is_fused=True)
    return whole
