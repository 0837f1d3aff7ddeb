"""Attention that keeps the sequences of a packed row apart, without any library beyond torch.

Sequences are sorted into classes of similar length (`length_classes`). The tokens of each class are scattered into a
padded [sequences, longest] batch, run through causal attention and gathered back. Padding is at the end, so under a
causal mask no real token sees it. Every other layer computes real tokens only.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from asyncrl.trainer.step.batch import PackedLayout, PaddedClass

_ALIGNED = 8
"""Entries that heads with sinks get more: kernels of GPUs want sizes that 8 divides."""


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention inside each sequence of a packed row.

    Legend: H query heads, K key heads, N packed tokens, D head size, S sequences of a class, L the longest of them.

    Args:
        query: [N, H, D]; key, value: [N, K, D], H a multiple of K.
        sliding_window: a token sees itself and the `sliding_window - 1` before it.
        sinks: [H], a logit of each head that takes weight and gives no value (gpt-oss).

    Returns:
        [N, H, D].
    """
    queries, keys, values = (_by_class(x, layout) for x in (query, key, value))
    parts: list[torch.Tensor] = []
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    for similar, q_NHD, k_NKD, v_NKD in zip(layout.classes, queries, keys, values, strict=True):
        q_SHLD, k_SKLD, v_SKLD = _pad(q_NHD, similar), _pad(k_NKD, similar), _pad(v_NKD, similar)
        # Padding is at the end, so a plain causal mask suffices; a window that cuts anything needs its own mask.
        window = None
        if sliding_window is not None and similar.max_length > sliding_window:
            window = _band(similar.max_length, sliding_window, query.device)
        if sinks is not None:
            q_SHLD, k_SKLD, v_SKLD, window = _with_sinks(q_SHLD, k_SKLD, v_SKLD, window, sinks / scale)
        out_SHLD = scaled_dot_product_attention(
            q_SHLD,
            k_SKLD,
            v_SKLD,
            attn_mask=window,
            dropout_p=dropout,
            is_causal=window is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        if sinks is not None:
            out_SHLD = out_SHLD[:, :, 1:, : value.shape[-1]]
        parts.append(_unpad(out_SHLD, similar))
    return _joined(parts, layout)


def _with_sinks(
    q_SHLD: torch.Tensor,
    k_SKLD: torch.Tensor,
    v_SKLD: torch.Tensor,
    window: torch.Tensor | None,
    logits_H: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Each head's sink as a token before the first, with a key that only a further entry of the queries meets, and the
    value 0: so every kernel of torch has sinks, with their gradient."""
    q, k, v = (pad(x, (0, _ALIGNED, 1, 0)) for x in (q_SHLD, k_SKLD, v_SKLD))
    at = q_SHLD.shape[-1]
    only = torch.zeros(q.shape[-1], dtype=q.dtype, device=q.device).index_fill_(0, torch.tensor(at, device=q.device), 1)
    k[:, :, 0] = only
    q = q + logits_H.to(q.dtype)[:, None, None] * only
    return q, k, v, window if window is None else pad(pad(window, (0, 0, 1, 0)), (1, 0), value=True)


def _by_class(rows: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, ...]:
    """The rows of the tokens of each class."""
    if layout.order is not None:
        rows = rows.index_select(0, layout.order)
    if len(layout.classes) == 1:
        return (rows,)
    return rows.split([similar.num_tokens for similar in layout.classes])  # slices would cost a whole gradient each


def _joined(parts: list[torch.Tensor], layout: PackedLayout) -> torch.Tensor:
    """The rows of all classes, in the order of the packed row."""
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows if layout.places is None else rows.index_select(0, layout.places)


def _pad(rows_NHD: torch.Tensor, similar: PaddedClass) -> torch.Tensor:
    """[S, H, L, D] of the sequences of a class."""
    if similar.slots is not None:
        padded = rows_NHD.new_zeros(similar.num_sequences * similar.max_length, *rows_NHD.shape[1:])
        rows_NHD = padded.index_copy_(0, similar.slots, rows_NHD)
    return rows_NHD.unflatten(0, (similar.num_sequences, similar.max_length)).transpose(1, 2)


def _unpad(out_SHLD: torch.Tensor, similar: PaddedClass) -> torch.Tensor:
    """[tokens of the class, H, D]."""
    rows = out_SHLD.transpose(1, 2).flatten(0, 1)
    return rows if similar.slots is None else rows.index_select(0, similar.slots)


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
        query: [n, H, D], laid out as `own` says; key, value: [N, K, D], as `whole` says. The two layouts have the same
            sequences in their classes.
        positions: [n] int64, of the queries in their sequences.

    Returns:
        [n, H, D].
    """
    queries, places = _by_class(query, own), _by_class(positions[:, None, None], own)
    keys, values = _by_class(key, whole), _by_class(value, whole)
    parts: list[torch.Tensor] = []
    for number, (mine, similar) in enumerate(zip(own.classes, whole.classes, strict=True)):
        q_SHLD = _pad(queries[number], mine)
        k_SKLD, v_SKLD = _pad(keys[number], similar), _pad(values[number], similar)
        at_SL = _pad(places[number], mine)[:, 0, :, 0]
        keys_L = torch.arange(similar.max_length, device=query.device)
        seen_SLL = keys_L <= at_SL[:, :, None]
        out_SHLD = scaled_dot_product_attention(
            q_SHLD,
            k_SKLD,
            v_SKLD,
            attn_mask=seen_SLL[:, None],
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(_unpad(out_SHLD, mine))
    return _joined(parts, own)
