"""The tensors of a model, from its config alone, for plans made before weights are read. Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.types import LayerSizes, ModelFacts

EMBEDDING, OUTPUT, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
MODEL_TYPES = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Architectures whose tensors are known."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes that one trainer rank holds during a step, without publish buffers and the allocator's cache.

    Attributes:
        ranks: which ranks these figures describe, in words; the largest such rank counts.
        weights: of all models in training, and of the reference.
        optimizer: master weights and moments.
        passes: additional memory of forward and backward over a full micro-batch: activations, gathered layers and
            their gradients, chunks of logits. None: not estimated.
        peak: maximum on the rank's device; None if `passes` is None.
        between_steps: what stays on the rank's device.
    """

    ranks: str
    weights: int
    gradients: int
    optimizer: int
    passes: int | None = None
    peak: int | None = None
    between_steps: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def logits_per_chunk(device: str) -> int:
    """Entries of one block of logits: 1 GiB in float32 on GPUs, where products need many rows; 256 MiB on CPUs."""
    return 1 << 26 if device == "cpu" else 1 << 28


def model_tensors(facts: ModelFacts) -> dict[str, Shape] | None:
    """Hugging Face name -> shape, a tied tensor once; None if `facts` does not say enough."""
    sizes = facts.sizes
    if facts.model_type not in MODEL_TYPES or None in (sizes.layers, sizes.hidden, sizes.heads, sizes.ffn):
        return None
    return dict(_tensors(facts, sizes))


def layer_of(name: str) -> int | None:
    """Number of the layer that contains the tensor `name`; None: outside the layers."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def _tensors(facts: ModelFacts, sizes: LayerSizes) -> Iterator[tuple[str, Shape]]:
    hidden, rows = sizes.hidden or 0, facts.vocab_size or 0
    yield EMBEDDING, (rows, hidden)
    for layer in range(sizes.layers or 0):
        for name, shape in _layer(facts, sizes, sparse=layer in sizes.expert_layers):
            yield f"model.layers.{layer}.{name}", shape
    yield NORM, (hidden,)
    if not sizes.tied:
        yield OUTPUT, (rows, hidden)


def _layer(facts: ModelFacts, sizes: LayerSizes, *, sparse: bool) -> Iterator[tuple[str, Shape]]:
    hidden, heads = sizes.hidden or 0, sizes.heads or 1
    size = sizes.head_dim or hidden // heads
    rows = {"q": heads * size, "k": (sizes.kv_heads or heads) * size, "v": (sizes.kv_heads or heads) * size}
    yield "input_layernorm.weight", (hidden,)
    for part, count in rows.items():
        yield f"self_attn.{part}_proj.weight", (count, hidden)
        if facts.model_type in ("qwen2", "qwen2_moe"):
            yield f"self_attn.{part}_proj.bias", (count,)
    yield "self_attn.o_proj.weight", (hidden, heads * size)
    if facts.model_type in ("qwen3", "qwen3_moe"):
        yield "self_attn.q_norm.weight", (size,)
        yield "self_attn.k_norm.weight", (size,)
    yield "post_attention_layernorm.weight", (hidden,)
    if not sparse:
        yield from _gated("mlp", hidden, sizes.ffn or 0)
        return
    yield "mlp.gate.weight", (facts.num_experts, hidden)
    for expert in range(facts.num_experts):
        yield from _gated(f"mlp.experts.{expert}", hidden, sizes.expert_ffn or 0)
    if sizes.shared_ffn:
        yield from _gated("mlp.shared_expert", hidden, sizes.shared_ffn)
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _gated(place: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{place}.gate_proj.weight", (width, hidden)
    yield f"{place}.up_proj.weight", (width, hidden)
    yield f"{place}.down_proj.weight", (hidden, width)
