"""What a response of SGLang says. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.inference.shared.stamped_stream import Output


def output_of(rid: str, out: dict[str, Any], sent: int, *, incremental: bool) -> Output:
    """One of SGLang's responses. `sent`: tokens that came before. `incremental`: responses hold what is new; otherwise
    all tokens so far. The last response of a request that waited in SGLang's queue repeats tokens in both cases."""
    meta = out["meta_info"]
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
    spans = meta.get("weight_versions")
    refused = finish["type"] == "abort" and finish.get("status_code") is not None
    return Output(
        rid,
        ids,
        values,
        finish["type"],
        None if spans is None else tuple((span["version"], span["start"]) for span in spans),
        meta.get("cached_tokens", 0),
        str(finish.get("message", "")) if refused else "",
    )
