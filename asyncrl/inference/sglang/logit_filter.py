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
            if "min_tokens" in filters and _number(filters) <= filters["min_tokens"]:
                logits[row, filters["barred"]] = -torch.inf
        filtered = [i for i, filters in enumerate(rows) if "top_p" in filters or "top_k" in filters]
        if filtered:
            index = torch.tensor(filtered, device=logits.device)
            logits[index] = _kept(logits[index], [rows[i] for i in filtered])
        return logits


def _number(filters: dict[str, Any]) -> int:
    """The number of the token that is drawn now, from 1; 0 or less for a chunk of a prompt that is not its last: SGLang
    drops what it draws there.

    Results may lag behind draws, so tokens are counted by the steps that SGLang has prepared: up to where the last
    prefill went, and one for each decoding since. Without these counters, by the results: it may be one too low.
    """
    request = filters["__req__"]
    prefilled = getattr(request, "extend_end", None)
    if prefilled is None or not hasattr(request, "decode_batch_idx"):
        return len(request.output_ids) + 1
    return prefilled + request.decode_batch_idx - len(request.origin_input_ids) + 1


def _kept(logits: torch.Tensor, rows: list[dict[str, Any]]) -> torch.Tensor:
    """[n, V] -> the same, -inf where top-k and top-p, which work after temperature, leave no token."""
    vocab, device = logits.shape[1], logits.device
    temperature = torch.tensor([row["temperature"] for row in rows], device=device)
    top_k = torch.tensor([row.get("top_k", vocab) for row in rows], device=device)
    top_p = torch.tensor([row.get("top_p", 1.0) for row in rows], device=device)
    return logits.masked_fill(~kept_tokens(logits / temperature[:, None], top_k, top_p), -torch.inf)
