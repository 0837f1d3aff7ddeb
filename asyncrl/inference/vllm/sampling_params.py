"""Converts a `GenerationRequest` to vLLM's SamplingParams."""

from __future__ import annotations

from typing import Any

from asyncrl.inference.shared.request_checks import samplable_stops
from asyncrl.types import GenerationRequest
from asyncrl.types.splitmix import GOLDEN, mix


def sampling_params(request: GenerationRequest, vocab_size: int) -> Any:
    """vLLM's SamplingParams. Only `stop_token_ids` end a response; the model's own end token must be among them to
    count.

    For a scoring request vLLM still samples one token, which is dropped.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    sampling = request.sampling
    if request.sampling.score_from is not None:
        scored = {"max_tokens": 1, "prompt_logprobs": sampling.score_top, "ignore_eos": True, "detokenize": False}
        return SamplingParams(temperature=0, output_kind=RequestOutputKind.DELTA, **scored)
    guide = None if sampling.json_schema is None else StructuredOutputsParams(json=sampling.json_schema)
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=samplable_stops(request, vocab_size),
        seed=stream_seed(request.seed, request.first_position),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,  # avoids a dictionary and an object per token
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=guide,
    )
    if sampling.experts:  # a token is predicted at the previous position, whose experts count as its own
        params.routed_experts_prompt_start = len(request.prompt_ids) - 1
    return params


def stream_seed(seed: int, first_position: int) -> int:
    """The seed of one vLLM request, in `[0, 2**63)`.

    vLLM's per-request generator cannot start in the middle of a stream, so a resumed request gets a new, independent
    stream. Source: the finaliser of SplitMix64, applied to each number.
    """
    return mix(mix(seed + GOLDEN) + first_position + GOLDEN) >> 1
