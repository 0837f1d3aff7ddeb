"""Converts a `GenerationRequest` to fields of SGLang's GenerateReqInput. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from asyncrl.inference.shared.request_checks import samplable_stops
from asyncrl.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as sent to the host process.

    Attributes:
        rid: unique and of fixed length, because SGLang aborts by prefix.
        filters: parameters of `logit_filter.LogitFilter`, which replaces SGLang's own filters; None: no filters.
        stops: stop tokens that SGLang ignores and the host checks.
        experts: record the experts of the tokens.
    """

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    extra_key: str
    filters: dict[str, Any] | None
    stops: frozenset[int]
    experts: bool = False


def asked(request: GenerationRequest, *, rid: str, extra_key: str, vocab_size: int, eos: Collection[int]) -> Asked:
    """Converts the request, working around two limits of SGLang:

    It reports log-probabilities before its top-p and top-k, and ignores min_tokens if it has no tokenizer. Requests
    with any of the three go through `logit_filter.LogitFilter` instead.

    It checks either the model's own end tokens in addition to `stop_token_ids`, or no stop token at all. Here only
    `stop_token_ids` may end a response, so the host checks them if the model has an end token that is not among them.

    Args:
        extra_key: requests with equal keys share the KV cache of prompts.
        eos: the model's own end tokens.
    """
    sampling = request.sampling
    stops = samplable_stops(request, vocab_size)
    native = bool(stops) and set(eos) <= set(stops)
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_tokens,
        "ignore_eos": not native,
        "sampling_seed": request.seed & (1 << 63) - 1,
    }
    if native:
        params["stop_token_ids"] = stops
    # Greedy requests (temperature 0) need no top-p or top-k.
    filters: dict[str, Any] = {}
    if sampling.temperature and sampling.top_p < 1:
        filters["top_p"] = sampling.top_p
    if sampling.temperature and sampling.top_k:
        filters["top_k"] = min(sampling.top_k, vocab_size)
    if sampling.min_tokens:
        filters |= {"barred": stops, "min_tokens": sampling.min_tokens}
    if filters:
        filters["temperature"] = sampling.temperature or 1.0
    return Asked(
        rid=rid,
        input_ids=request.prompt_ids.tolist(),
        sampling_params=params,
        extra_key=extra_key,
        filters=filters or None,
        stops=frozenset() if native else frozenset(stops),
        experts=sampling.experts,
    )
