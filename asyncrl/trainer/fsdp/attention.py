"""Attention that keeps the sequences of a packed row apart, without any library beyond torch.

Packed tokens are scattered into a padded [sequences, longest] batch, run through causal attention and gathered back.
Padding stands at the end, so under a causal mask no real token ever sees it. The packing planner puts sequences of
similar length together, which keeps the padding small; every other layer computes real tokens only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.trainer.step.batch import PackedLayout

PACKED_SDPA = "packed_sdpa"


def register_packed_attention() -> None:
    """Makes `attn_implementation="packed_sdpa"` known to transformers. Idempotent."""
    AttentionInterface.register(PACKED_SDPA, packed_sdpa)


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

    Legend: H query heads, K key heads, N packed tokens, D head size, S sequences, L longest.

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
    q_SHLD, k_SKLD, v_SKLD = (_pad(x, packed_layout) for x in (query, key, value))
    window = None
    if sliding_window is not None and packed_layout.max_length > sliding_window:
        window = _band(packed_layout.max_length, sliding_window, query.device)
    out_SHLD = scaled_dot_product_attention(
        q_SHLD,
        k_SKLD,
        v_SKLD,
        attn_mask=window,
        dropout_p=dropout,
        is_causal=window is None,
        scale=scaling,
        enable_gqa=bool(query.shape[1] != key.shape[1]),  # symbolic while a compiler traces
    )
    out_rows = out_SHLD.transpose(1, 2).flatten(0, 1)
    if not packed_layout.is_dense:
        out_rows = out_rows.index_select(0, packed_layout.slots)
    return out_rows.unsqueeze(0), None


def _pad(x_1HND: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    rows_NHD = x_1HND[0].transpose(0, 1)
    if not layout.is_dense:
        padded = rows_NHD.new_zeros(layout.num_sequences * layout.max_length, *rows_NHD.shape[1:])
        rows_NHD = padded.index_copy_(0, layout.slots, rows_NHD)
    return rows_NHD.unflatten(0, (layout.num_sequences, layout.max_length)).transpose(1, 2)


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """[L, L] bool, True where the query (row) may see the key (column)."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)
