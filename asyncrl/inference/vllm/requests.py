"""What vLLM is asked: a `GenerationRequest` checked against the model and turned into vLLM's SamplingParams."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.types import GenerationRequest

_MASK = (1 << 64) - 1


def misfit(request: GenerationRequest, max_model_len: int, vocab_size: int) -> tuple[str, str] | None:
    """What is wrong with a request and what to do about it; None when it can be served."""
    prompt, sampling = request.prompt_ids, request.sampling
    if prompt.ndim != 1 or len(prompt) == 0 or not np.issubdtype(prompt.dtype, np.integer):
        found = f"prompt_ids of shape {prompt.shape} and dtype {prompt.dtype}"
        return found, "send a one-dimensional array of at least one token id"
    if sampling.max_tokens < 1:
        return f"max_tokens={sampling.max_tokens}", "ask for at least one token"
    if len(prompt) + sampling.max_tokens > max_model_len:
        found = f"max_model_len={max_model_len}, but {len(prompt)} prompt tokens + max_tokens={sampling.max_tokens}"
        return found, "shorten the prompt or the response, or raise rollout.vllm.max_model_len"
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        found = f"token ids from {prompt.min()} to {prompt.max()}, the model has {vocab_size}"
        return found, "tokenize with the model's own tokenizer"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return f"min_tokens={sampling.min_tokens}, max_tokens={sampling.max_tokens}", "0 <= min_tokens <= max_tokens"
    if sampling.min_tokens and len(_stops(request, vocab_size)) >= vocab_size:
        return "min_tokens with every token of the vocabulary a stop token", "leave a token that can be sampled"
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        return str(sampling), "temperature >= 0, 0 < top_p <= 1, top_k >= 0"
    return None


def sampling_params(request: GenerationRequest, vocab_size: int) -> Any:
    """vLLM's SamplingParams. Only `stop_token_ids` end a response: the model's own end token counts if it is there."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=_stops(request, vocab_size),
        seed=stream_seed(request.seed, request.first_position),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def stream_seed(seed: int, first_position: int) -> int:
    """The seed of one vLLM request, in `[0, 2**63)`.

    vLLM draws from one generator per request that cannot start in the middle: a resumed request gets another stream,
    independent of the one it had, and never the same again. Source: the finaliser of splitmix64 (Steele, Lea, Flood
    2014), once over each number.
    """
    return _mix(_mix(seed & _MASK) + first_position) >> 1


def _stops(request: GenerationRequest, vocab_size: int) -> list[int]:
    """Distinct stop tokens that can be sampled: vLLM would index its logits with the others."""
    return [i for i in dict.fromkeys(request.sampling.stop_token_ids) if 0 <= i < vocab_size]


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
