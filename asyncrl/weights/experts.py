"""Mixtures of experts: models hold the experts of a layer in one tensor, checkpoints have a tensor for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("qwen2_moe", "qwen3_moe")
"""Whose experts lie as `unfused` takes them."""

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def routers_of(model: Any) -> list[Any]:
    """The routers of a Hugging Face mixture of `MODEL_TYPES`, in the order of its layers; none of another model. A
    router returns logits [tokens, E], the weights of the chosen experts [tokens, k] and these experts [tokens, k]
    int64."""
    if model.config.model_type not in MODEL_TYPES:
        return []
    return [layer.mlp.gate for layer in model.base_model.layers if hasattr(layer.mlp, "experts")]


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


@dataclass(frozen=True, slots=True)
class FusedParts:
    """The tensors of a checkpoint that make up one tensor of a model, in the order in which it holds them: the experts
    in rows of one or two names, or one row of one name."""

    rows: tuple[tuple[str, ...], ...]
    is_fused: bool

    @property
    def names(self) -> list[str]:
        return [name for row in self.rows for name in row]

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Of the tensor of the model. `shapes`: of the parts."""
        first = shapes[self.rows[0][0]]
        return (len(self.rows), first[0] * len(self.rows[0]), *first[1:]) if self.is_fused else first

    def joined(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The tensor of the model. `read`: gives a part by its name."""
        import torch

        if not self.is_fused:
            return read(self.rows[0][0])
        return torch.stack([torch.cat([read(name) for name in row]) for row in self.rows])


def fused_parts(names: Iterable[str]) -> dict[str, FusedParts]:
    """Name in a model -> its parts among `names`, which are those of a checkpoint: the inverse of `unfused`."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    whole: dict[str, FusedParts] = {}
    for name in names:
        if matched := _OF_EXPERT.fullmatch(name):
            place, expert, part = matched.groups()
            fused = f"{place}.down_proj" if part == "down" else f"{place}.gate_up_proj"
            found.setdefault(fused, {}).setdefault(int(expert), {})[part] = name
        else:
            whole[name] = FusedParts(((name,),), is_fused=False)
    for fused, experts in found.items():
        rows = (
            tuple(row[part] for part in ("gate", "up", "down") if part in row) for _, row in sorted(experts.items())
        )
        whole[fused] = FusedParts(tuple(rows), is_fused=True)
    return whole
