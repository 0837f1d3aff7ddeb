"""Attention that keeps the sequences of a packed row apart, without any library beyond torch.

Packed tokens are scattered into a padded [sequences, longest] batch, run through causal attention and gathered back.
Padding stands at the end, so under a causal mask no real token ever sees it. The packing planner puts sequences of
similar length together, which keeps the padding small; every other layer computes real tokens only.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.trainer.step.batch import PackedLayout


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention inside each sequence of a packed row.

    Legend: H query heads, K key heads, N packed tokens, D head size, S sequences, L longest.

    Args:
        query: [N, H, D]; key, value: [N, K, D], H a multiple of K.
        sliding_window: a token sees itself and the `sliding_window - 1` before it.

    Returns:
        [N, H, D].
    """
    q_SHLD, k_SKLD, v_SKLD = (_pad(x, layout) for x in (query, key, value))
    window = None
    if sliding_window is not None and layout.max_length > sliding_window:
        window = _band(layout.max_length, sliding_window, query.device)
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
    return out_rows if layout.is_dense else out_rows.index_select(0, layout.slots)


def _pad(rows_NHD: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    if not layout.is_dense:
        padded = rows_NHD.new_zeros(layout.num_sequences * layout.max_length, *rows_NHD.shape[1:])
        rows_NHD = padded.index_copy_(0, layout.slots, rows_NHD)
    return rows_NHD.unflatten(0, (layout.num_sequences, layout.max_length)).transpose(1, 2)


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """[L, L] bool, True where the query (row) may see the key (column)."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)


def split_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: PackedLayout,
    whole: PackedLayout,
    positions: torch.Tensor,
    *,
    scaling: float | None = None,
) -> torch.Tensor:
    """Causal attention of some tokens of each sequence to the whole sequence.

    Args:
        query: [n, H, D], laid out as `own` says; key, value: [N, K, D], as `whole` says.
        positions: [n] int64, of the queries in their sequences.

    Returns:
        [n, H, D].
    """
    q_SHLD, (k_SKLD, v_SKLD) = _pad(query, own), (_pad(x, whole) for x in (key, value))
    at_SL = positions.new_zeros(own.num_sequences * own.max_length).index_copy_(0, own.slots, positions)
    keys_L = torch.arange(whole.max_length, device=query.device)
    seen_SLL = keys_L <= at_SL.view(own.num_sequences, own.max_length, 1)
    out_SHLD = scaled_dot_product_attention(
        q_SHLD, k_SKLD, v_SKLD, attn_mask=seen_SLL[:, None], scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out_SHLD.transpose(1, 2).flatten(0, 1).index_select(0, own.slots)
