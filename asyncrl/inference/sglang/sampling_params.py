"""What SGLang is asked: a `GenerationRequest` as the fields of SGLang's GenerateReqInput. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from asyncrl.inference.shared.request_checks import samplable_stops
from asyncrl.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class Asked:
    """One request on the way to the host process.

    Attributes:
        rid: unique and of fixed length: SGLang aborts by prefix.
        filters: parameters of `logit_filter`, which does what SGLang's own filters would; None without any.
        stops: tokens that end the response and that SGLang does not look at; the host does.
        experts: the experts of the tokens are wanted too.
    """

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    extra_key: str
    filters: dict[str, Any] | None
    stops: frozenset[int]
    experts: bool = False


def asked(request: GenerationRequest, *, rid: str, extra_key: str, vocab_size: int, eos: Collection[int]) -> Asked:
    """The request as SGLang takes it.

    SGLang reports log-probabilities before its top-p and top-k, and bars no stop token where it has no tokenizer: a
    request with any of these goes through `logit_filter` instead.

    SGLang always looks at the model's own end tokens, or at no stop token at all. Only `stop_token_ids` end a response
    here; the host looks at them where the model has an end token that is not among them.

    Args:
        extra_key: requests with the same one share the KV cache of prompts.
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
