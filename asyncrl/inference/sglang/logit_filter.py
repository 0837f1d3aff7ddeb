"""top-p, top-k and min-tokens in SGLang's schedulers, with the log-probabilities of what is drawn."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from asyncrl.inference.shared.token_filters import kept_tokens


class LogitFilter(CustomLogitProcessor):
    """Bars tokens before SGLang draws: it then draws from, and reports, the distribution of those that are left."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """`logits`: [n, V], changed in place. `custom_param_list`: `Asked.filters` of each row."""
        rows = custom_param_list or []
        for row, filters in enumerate(rows):
            if _counted(filters) <= filters.get("min_tokens", 0):
                logits[row, filters["barred"]] = -torch.inf
        filtered = [i for i, filters in enumerate(rows) if "top_p" in filters or "top_k" in filters]
        if filtered:
            index = torch.tensor(filtered, device=logits.device)
            logits[index] = _kept(logits[index], [rows[i] for i in filtered])
        return logits


def _counted(filters: dict[str, Any]) -> int:
    """The number of the token that is drawn now, from 1. The parameters of a request are one object while it lives; a
    chunk of a prompt that is not its last draws a token that SGLang drops."""
    request = filters.get("__req__")
    if getattr(request, "inflight_middle_chunks", 0) or getattr(request, "is_chunked", 0):
        return filters.get("drawn", 0) + 1
    filters["drawn"] = filters.get("drawn", 0) + 1
    return filters["drawn"]


def _kept(logits: torch.Tensor, rows: list[dict[str, Any]]) -> torch.Tensor:
    """[n, V] -> the same, -inf where top-k and top-p, which work after temperature, leave no token."""
    vocab, device = logits.shape[1], logits.device
    temperature = torch.tensor([row["temperature"] for row in rows], device=device)
    top_k = torch.tensor([row.get("top_k", vocab) for row in rows], device=device)
    top_p = torch.tensor([row.get("top_p", 1.0) for row in rows], device=device)
    return logits.masked_fill(~kept_tokens(logits / temperature[:, None], top_k, top_p), -torch.inf)
