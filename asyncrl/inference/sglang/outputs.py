"""Parses responses of SGLang. Pure."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.inference.shared.stamped_stream import Output


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Layout of the experts in SGLang's responses.

    Attributes:
        layers: number of all layers; SGLang has a row for each.
        chosen: indices of the layers that have experts.
    """

    layers: int
    chosen: Sequence[int]

    def of(self, text: str, tokens: int) -> np.ndarray:
        """[tokens, L, k] int16, of the response's tokens. `text`: `routed_experts`, requested from the prompt's last
        token on."""
        rows = np.frombuffer(base64.b64decode(text), np.int32)
        return rows.reshape(tokens, self.layers, -1)[:, list(self.chosen)].astype(np.int16)


def output_of(
    rid: str, out: dict[str, Any], sent: int, *, incremental: bool, experts: ExpertRows | None = None
) -> Output:
    """Parses one response. `sent`: tokens received before. `incremental`: responses are deltas; otherwise they hold all
    tokens so far. The last response of a request that waited in SGLang's queue repeats tokens in both cases. `experts`:
    None if no request records them."""
    meta = out["meta_info"]
    # `completion_tokens` decides what is new: the lists may repeat earlier tokens.
    first, new = (0 if incremental else sent), meta["completion_tokens"] - sent
    ids = np.asarray(out["output_ids"][first : first + new], np.int32)
    logprobs = meta.get("output_token_logprobs") or []
    values = np.array([entry[0] for entry in logprobs[first : first + new]], np.float32)
    finish = meta.get("finish_reason")
    if len(ids) != new or len(values) != new:
        found = f"{new} new tokens with {len(ids)} ids and {len(values)} log-probabilities"
        raise RuntimeError(f"SGLang answered {found}")
    if finish is None:
        return Output(rid, ids, values)
    # Only the last response has versions, experts and the reason of a refusal.
    spans = meta.get("weight_versions")
    text, tokens = meta.get("routed_experts"), meta["completion_tokens"]
    refused = finish["type"] == "abort" and finish.get("status_code") is not None
    return Output(
        rid,
        ids,
        values,
        finish["type"],
        None if spans is None else tuple((span["version"], span["start"]) for span in spans),
        meta.get("cached_tokens", 0),
        str(finish.get("message", "")) if refused else "",
        experts.of(text, tokens) if experts is not None and text and tokens else None,
    )
