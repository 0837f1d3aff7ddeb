"""Maps each tensor of Megatron-core to parts of Hugging Face tensors, as data. Pure; imports no torch.

Loading, publishing and checkpoints use this map. A tensor of a rank consists of `Block`s, each a run of rows or columns
of one Hugging Face tensor. Loading copies the blocks in, publishing copies them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.trainer.megatron.sizes import ModelSizes

Kind = Literal["whole", "columns", "qkv", "gate_up"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a layer's tensor is made of the tensors `names`, and how ranks split it.

    whole      every rank has all of it
    columns    split by columns
    qkv        for each key-value head its queries, its key and its value; split by rows
    gate_up    each rank has its rows of the gate, then its rows of the up projection

    `extent`: entries of the whole tensor along the dimension of its blocks: a number, or an attribute of `ModelSizes`.
    Unused with qkv.
    """

    kind: Kind
    names: tuple[str, ...]
    extent: str | int = "hidden_size"


def _qkv(part: str) -> Rule:
    return Rule("qkv", tuple(f"self_attn.{p}_proj.{part}" for p in "qkv"))


def _gate_up(module: str, extent: str) -> Rule:
    return Rule("gate_up", (f"{module}.gate_proj.weight", f"{module}.up_proj.weight"), extent)


_INPUT_NORM = Rule("whole", ("input_layernorm.weight",))
_MLP_NORM = Rule("whole", ("post_attention_layernorm.weight",))
LAYER: dict[str, Rule] = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": Rule("whole", ("self_attn.q_norm.weight",), "head_dim"),
    "self_attention.k_layernorm.weight": Rule("whole", ("self_attn.k_norm.weight",), "head_dim"),
    "self_attention.linear_proj.weight": Rule("columns", ("self_attn.o_proj.weight",), "attention_size"),
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "mlp.linear_fc1.weight": _gate_up("mlp", "ffn_size"),
    "mlp.linear_fc2.weight": Rule("columns", ("mlp.down_proj.weight",), "ffn_size"),
    "mlp.router.weight": Rule("whole", ("mlp.gate.weight",), "num_experts"),
    "mlp.shared_experts.linear_fc1.weight": _gate_up("mlp.shared_expert", "shared_expert_size"),
    "mlp.shared_experts.linear_fc2.weight": Rule(
        "columns", ("mlp.shared_expert.down_proj.weight",), "shared_expert_size"
    ),
    "mlp.shared_experts.gate_weight": Rule("whole", ("mlp.shared_expert_gate.weight",), 1),
    "mlp.experts.linear_fc1.weight": _gate_up("mlp.experts.{expert}", "expert_size"),
    "mlp.experts.linear_fc2.weight": Rule("columns", ("mlp.experts.{expert}.down_proj.weight",), "expert_size"),
}
"""Tensor of a Megatron-core layer -> its rule. `{expert}`: the expert's number in the model. If two names share a rule,
the second belongs to TransformerEngine's layers."""

_BY_COLUMNS = tuple(rule.names[0].rpartition("{expert}")[2] for rule in LAYER.values() if rule.kind == "columns")

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
_VALUE_HEAD = {"value_head.weight": "head.weight", "value_head.bias": "head.bias"}
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"(mlp\.experts\.)local_experts\.(\d+)\.(.+)")
_TE_EXPERT = re.compile(r"(mlp\.experts\.linear_fc[12]\.weight)(\d+)")


@dataclass(frozen=True, slots=True)
class Block:
    """Entries `[local, local + length)` of a rank's tensor along `dim` are `[start, start + length)` of `name`."""

    name: str
    dim: int
    start: int
    local: int
    length: int


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor of a rank. Entries that no block covers are padding: zero.

    Attributes:
        is_split: ranks of a tensor-parallel group hold different entries, even if the group has one rank.
        dim: along which they split it.
    """

    blocks: tuple[Block, ...]
    is_split: bool
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's index in each parallel group, and the groups' sizes."""

    tensor: int = 0
    num_tensor: int = 1
    expert_tensor: int = 0
    num_expert_tensor: int = 1
    expert: int = 0
    num_expert: int = 1


def describe(name: str, sizes: ModelSizes, at: Coordinates, first_layer: int) -> LocalTensor:
    """The contents of the parameter `name` of a part of the model.

    Args:
        first_layer: number of the part's first layer in the whole model.

    Raises:
        KeyError: no rule covers `name`.
    """
    # Outside the layers: embedding, output layer, final norm, value head.
    if name in (EMBEDDING, OUTPUT):
        whole = "model.embed_tokens.weight" if name == EMBEDDING or sizes.tied else "lm_head.weight"
        rows = sizes.padded_vocabulary(at.num_tensor) // at.num_tensor
        return LocalTensor(_cut([(whole, 0, sizes.vocab_size)], 0, at.tensor * rows, rows), True, 0)
    if name == FINAL_NORM:
        return _whole("model.norm.weight", sizes.hidden_size)
    if name in _VALUE_HEAD:
        return _whole(_VALUE_HEAD[name], 1)
    # Inside a layer: both implementations number a rank's experts locally, in different places of the name.
    found = _IN_LAYER.fullmatch(name)
    if found is None:
        raise KeyError(name)
    inside, expert = found[2], None
    if local := _LOCAL_EXPERT.fullmatch(inside):
        inside, expert = local[1] + local[3], int(local[2])
    elif grouped := _TE_EXPERT.fullmatch(inside):
        inside, expert = grouped[1], int(grouped[2])
    rule, layer = LAYER[inside], int(found[1]) + first_layer
    number = None if expert is None else expert + at.expert * (sizes.num_experts // at.num_expert)
    names = [f"model.layers.{layer}." + part.format(expert=number) for part in rule.names]
    # Experts have their own tensor-parallel groups.
    rank, ranks = (at.tensor, at.num_tensor)
    if expert is not None:
        rank, ranks = (at.expert_tensor, at.num_expert_tensor)
    return _in_layer(rule, names, sizes, rank, ranks)


def _in_layer(rule: Rule, names: Sequence[str], sizes: ModelSizes, rank: int, ranks: int) -> LocalTensor:
    if rule.kind == "qkv":
        segments = list(_qkv_segments(names, sizes))
        rows = sum(length for _, _, length in segments) // ranks
        return LocalTensor(_cut(segments, 0, rank * rows, rows), True, 0)
    extent = rule.extent if isinstance(rule.extent, int) else getattr(sizes, rule.extent)
    if rule.kind == "whole":
        return _whole(names[0], extent)
    own = extent // ranks
    if rule.kind == "columns":
        return LocalTensor((Block(names[0], 1, rank * own, 0, own),), True, 1)
    return LocalTensor(tuple(Block(name, 0, rank * own, i * own, own) for i, name in enumerate(names)), True, 0)


def _qkv_segments(names: Sequence[str], sizes: ModelSizes) -> Iterator[tuple[str, int, int]]:
    """(name, first row, number of rows) in the order of the fused tensor."""
    size, queries = sizes.head_dim, sizes.num_heads // sizes.num_kv_heads * sizes.head_dim
    for head in range(sizes.num_kv_heads):
        yield names[0], head * queries, queries
        yield names[1], head * size, size
        yield names[2], head * size, size


def _cut(segments: Sequence[tuple[str, int, int]], dim: int, start: int, length: int) -> tuple[Block, ...]:
    """The blocks for entries `[start, start + length)` of the concatenated segments."""
    found, at = [], 0
    for name, first, extent in segments:
        low, high = max(at, start), min(at + extent, start + length)
        if low < high:
            found.append(Block(name, dim, first + low - at, low - start, high - low))
        at += extent
    return tuple(found)


def _whole(name: str, length: int) -> LocalTensor:
    return LocalTensor((Block(name, 0, 0, 0, length),), False, 0)


def dim_of(name: str) -> int:
    """The dimension along which blocks of the Hugging Face tensor `name` run."""
    return 1 if name.endswith(_BY_COLUMNS) else 0


def order(name: str) -> tuple[int, int, str]:
    """Sort key of Hugging Face names: embedding, layers by number, final norm, output layer, anything else."""
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    if layer:
        numbers = re.sub(r"\d+", lambda n: n[0].zfill(6), layer[2])  # experts by number too
        return 1, int(layer[1]), numbers
    ends = {"model.embed_tokens.weight": 0, "model.norm.weight": 2, "lm_head.weight": 3}
    return ends.get(name, 4), 0, name
