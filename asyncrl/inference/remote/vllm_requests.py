"""Bodies of requests to a vLLM server, and its answers. Pure."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from asyncrl.errors import GenerationError, explain
from asyncrl.inference.remote.dialect import Labels
from asyncrl.inference.shared.request_checks import samplable_stops
from asyncrl.inference.shared.stamped_stream import Output
from asyncrl.inference.vllm.sampling_params import stream_seed
from asyncrl.types import GenerationRequest

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
_DATA, _DONE = "data: ", "[DONE]"


def body_of(request: GenerationRequest, *, rid: str, cache_salt: str, vocab_size: int) -> dict[str, Any]:
    """As `ServerDialect.body_of`."""
    sampling = request.sampling
    return {
        "request_id": rid,
        "token_ids": request.prompt_ids.tolist(),
        "stream": True,
        "cache_salt": cache_salt,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "stop_token_ids": samplable_stops(request, vocab_size),
            "seed": stream_seed(request.seed, request.first_position),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
    }


def abort_id(rid: str) -> str:
    """The id of an attempt for `ABORT`."""
    return f"generate-tokens-{rid}"


def output_of(line: str, labels: Labels) -> Output | None:
    """Parses one line of the streamed answer; None: no tokens and no end.

    Raises:
        GenerationError: the server ended the request with an error.
        ForeignWeights: as `Labels.version`.
        ValueError, LookupError, TypeError: malformed line.
    """
    if not line.startswith(_DATA) or line == _DATA + _DONE:
        return None
    held = json.loads(line.removeprefix(_DATA))
    if "error" in held:
        told = str(held["error"])[:500]
        raise GenerationError(explain("generate", f"the server answers {told}", "look at the log of the server"))
    if not held["choices"]:
        return None
    # Log-probabilities and ids are separate lists: a length mismatch would shift them silently.
    choice = held["choices"][0]
    ids, entries = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("content") or []
    if len(ids) != len(entries):
        raise ValueError(f"{len(ids)} token ids with {len(entries)} log-probabilities")
    spans = choice.get("weight_versions")
    return Output(
        "",
        np.array(ids, np.int32),
        np.array([entry["logprob"] for entry in entries], np.float32),
        choice.get("finish_reason"),
        None if spans is None else tuple((labels.version(str(span["version"])), span["start"]) for span in spans),
    )
