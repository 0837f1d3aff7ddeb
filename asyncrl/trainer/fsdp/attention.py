"""`packed_attention` as an attention implementation of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from asyncrl.trainer.packed_attention import packed_attention
from asyncrl.trainer.step.batch import PackedLayout

PACKED_SDPA = "packed_sdpa"


def register_packed_attention() -> None:
    """Makes `attn_implementation="packed_sdpa"` known to transformers. Idempotent."""
    AttentionInterface.register(PACKED_SDPA, packed_sdpa)


@torch.compiler.disable  # a compiled layer calls it: traced, each number of classes would be compiled again
def packed_sdpa(  # noqa: PLR0913 the signature is that of transformers' interface
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of a packed row.

    Legend: H query heads, K key heads, N packed tokens, D head size.

    Args:
        query: [1, H, N, D]; key, value: [1, K, N, D], H a multiple of K.
        attention_mask: None; the layout says all there is to mask.
        sliding_window: a token sees itself and the `sliding_window - 1` before it.

    Returns:
        [1, N, H, D], and None for the weights, which are never formed.

    Raises:
        ValueError: the model asks for a feature of attention that this implementation does not have.
    """
    unknown = sorted(name for name in ("softcap", "s_aux", "position_bias") if features.get(name) is not None)
    if unknown or attention_mask is not None:
        raise ValueError(f"{PACKED_SDPA} supports neither an attention mask nor {unknown or 'other features'}")
    q_NHD, k_NKD, v_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_NHD = packed_attention(
        q_NHD, k_NKD, v_NKD, packed_layout, dropout=dropout, scaling=scaling, sliding_window=sliding_window
    )
    return out_NHD.unsqueeze(0), None
