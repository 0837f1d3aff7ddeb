"""Which tokens top-k and top-p leave."""

from __future__ import annotations

import torch


def kept_tokens(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[N, V] bool, the tokens that each row may draw.

    Args:
        logits: [N, V], after temperature.
        top_k: [N] int64; V keeps all.
        top_p: [N] float; 1 keeps all. It applies to what top-k left.
    """
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    beyond_k = torch.arange(logits.shape[1], device=logits.device) >= top_k[:, None]
    probabilities = torch.softmax(ordered.masked_fill(beyond_k, float("-inf")), dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The token that crosses top_p is kept; with top_p=1 nothing may be lost to rounding.
    beyond_p = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    return torch.zeros_like(beyond_k.expand_as(order)).scatter(1, order, ~(beyond_k | beyond_p))
