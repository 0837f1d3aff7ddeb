"""The sizes of a model that determine how Megatron-core builds and splits it. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.types.models import expert_layers_of

VOCABULARY_ROWS = 8
"""Each tensor-parallel rank holds a multiple of this many vocabulary rows, for fast matrix products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Read from a model's config by `of_config`.

    Attributes:
        qkv_bias: query, key and value projections have a bias.
        qk_norm: queries and keys are normalised, per head.
        tied: the output layer is the embedding.
        rope_factor: of Llama 3's scaling of rotary positions; None: no scaling.
        num_experts: in a layer with experts; 0 in a model without.
        expert_layers: numbers of the layers that have experts; the others have one feed-forward block.
        shared_expert_size: width of the expert that every token takes; 0 without one.
        normalizes_experts: the weights of a token's experts are scaled to sum to 1.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_epsilon: float
    rope_base: float
    max_positions: int
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    rope_factor: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    expert_layers: frozenset[int] = frozenset()
    shared_expert_size: int = 0
    normalizes_experts: bool = True

    @property
    def attention_size(self) -> int:
        """Width of all heads of the queries."""
        return self.num_heads * self.head_dim

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> ModelSizes:
        """`config`: of a loaded Hugging Face config, in which every key has a value."""
        kind, heads = config["model_type"], config["num_attention_heads"]
        rope = config.get("rope_parameters") or {}
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        return ModelSizes(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            norm_epsilon=config["rms_norm_eps"],
            rope_base=float(rope["rope_theta"]),
            max_positions=config["max_position_embeddings"],
            qkv_bias=kind in ("qwen2", "qwen2_moe") and bool(config.get("qkv_bias", True)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            tied=bool(config.get("tie_word_embeddings")),
            rope_factor=float(rope["factor"]) if rope.get("rope_type") == "llama3" else None,
            num_experts=experts,
            experts_per_token=config.get("num_experts_per_tok") or 0 if experts else 0,
            expert_size=config.get("moe_intermediate_size") or 0 if experts else 0,
            expert_layers=frozenset(expert_layers_of(config)),
            shared_expert_size=config.get("shared_expert_intermediate_size") or 0 if experts else 0,
            normalizes_experts=bool(config.get("norm_topk_prob", True)),
        )

    def fingerprint(self) -> dict[str, int]:
        """The sizes that determine the shapes of the weights, by name."""
        names = "num_layers hidden_size num_heads num_kv_heads head_dim ffn_size vocab_size num_experts expert_size"
        return {name: getattr(self, name) for name in (*names.split(), "shared_expert_size")}

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        """Rows of the embedding over all ranks; rows from `vocab_size` on are zero and never trained."""
        unit = VOCABULARY_ROWS * tensor_parallel
        return -(-self.vocab_size // unit) * unit
