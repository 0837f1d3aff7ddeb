"""Checks of a `GenerationRequest` that are common to all engines. Pure."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from asyncrl.types import GenerationRequest

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM's range: it replaces lower temperatures by 0.01 and refuses higher ones."""
MIN_TOP_P = 1e-6
"""Below this, float32 keeps no token at all."""
MAX_TOP_K = 2**31 - 1
_NO_SCORES = "score_from, and this engine does not score given tokens", "use torch or vllm"


def misfit(
    request: GenerationRequest,
    *,
    engine: str,
    max_model_len: int,
    vocab_size: int,
    guided: bool = False,
    scores: bool = False,
    max_top: int | None = None,
    records: Collection[str] = (),
) -> tuple[str, str] | None:
    """Returns (found, do) of a request that cannot be served, else None.

    Args:
        engine: its name in a recipe.
        guided: the engine has guided decoding.
        scores: the engine scores given tokens.
        max_top: largest `score_top`; None: the vocabulary.
        records: arrays of `TOKEN_ARRAYS` that the engine can record of this model.
    """
    prompt, sampling = request.prompt_ids, request.sampling
    if prompt.ndim != 1 or len(prompt) == 0 or not np.issubdtype(prompt.dtype, np.integer):
        found = f"prompt_ids of shape {prompt.shape} and dtype {prompt.dtype}"
        return found, "send a one-dimensional array of at least one token id"
    if lacking := _lacking(request, guided, records):
        return lacking
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        found = f"token ids from {prompt.min()} to {prompt.max()}, the model has {vocab_size}"
        return found, "tokenize with the model's own tokenizer"
    if sampling.score_from is not None or sampling.score_top:
        return _misfit_of_scores(request, max_model_len, vocab_size, max_top) if scores else _NO_SCORES
    if sampling.max_tokens < 1:
        return f"max_tokens={sampling.max_tokens}", "ask for at least one token"
    if len(prompt) + sampling.max_tokens > max_model_len:
        found = f"max_model_len={max_model_len}, but {len(prompt)} prompt tokens + max_tokens={sampling.max_tokens}"
        return found, f"shorten the prompt or the response, or raise rollout.{engine}.max_model_len"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return f"min_tokens={sampling.min_tokens}, max_tokens={sampling.max_tokens}", "0 <= min_tokens <= max_tokens"
    if sampling.min_tokens and len(samplable_stops(request, vocab_size)) >= vocab_size:
        return "min_tokens with every token of the vocabulary a stop token", "leave a token that can be sampled"
    if sampling.temperature != 0 and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        return f"temperature={sampling.temperature}", f"0 (greedy), or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
    if not MIN_TOP_P <= sampling.top_p <= 1 or not 0 <= sampling.top_k <= MAX_TOP_K:
        found = f"top_p={sampling.top_p}, top_k={sampling.top_k}"
        return found, f"top_p from {MIN_TOP_P} to 1, top_k from 0 (off) to {MAX_TOP_K}"
    return None


def _lacking(request: GenerationRequest, guided: bool, records: Collection[str]) -> tuple[str, str] | None:
    """Like `misfit`, for features that only some engines have."""
    sampling = request.sampling
    if sampling.json_schema is not None and not guided:
        found = "json_schema, and this engine has no guided decoding"
        return found, "use vllm with rollout.vllm.structured_outputs=true"
    if sampling.json_schema is not None and request.first_position:
        return "json_schema for a response that has begun elsewhere", "ask again: a guide starts at the first token"
    if sampling.experts and "experts" not in records:
        found = "experts, and this engine records none of this model"
        return found, "use a mixture of experts with torch, or with vllm or sglang and record_experts=true"
    if sampling.kept and "kept_ids" not in records:
        return "kept, and this engine does not record what filters keep", "use torch"
    if sampling.kept and (sampling.top_k < 1 or sampling.temperature == 0):
        found = f"kept with top_k={sampling.top_k} and temperature={sampling.temperature:g}"
        return found, "give top_k, which bounds the tokens that are kept, and a temperature above 0"
    return None


def _misfit_of_scores(
    request: GenerationRequest, max_model_len: int, vocab_size: int, max_top: int | None
) -> tuple[str, str] | None:
    """Like `misfit`, for a request with `score_from`."""
    prompt, start = request.prompt_ids, request.sampling.score_from or 0
    largest = vocab_size if max_top is None else min(max_top, vocab_size)
    if not 1 <= start < len(prompt):
        return f"score_from={start} of {len(prompt)} tokens", "1 <= score_from < tokens: the first has no context"
    if not 0 <= request.sampling.score_top <= largest:
        found = f"score_top={request.sampling.score_top}, and this engine gives at most {largest} tokens of a place"
        return found, "ask for fewer; engine vllm gives up to its max_logprobs, and no engine more than the vocabulary"
    if len(prompt) >= max_model_len:
        found = f"max_model_len={max_model_len}, but {len(prompt)} tokens to score"
        return found, "shorten the text, or raise max_model_len of the engine: it has to exceed the number of tokens"
    return None


def samplable_stops(request: GenerationRequest, vocab_size: int) -> list[int]:
    """The distinct stop tokens within the vocabulary; others can never be sampled."""
    return [i for i in dict.fromkeys(request.sampling.stop_token_ids) if 0 <= i < vocab_size]
