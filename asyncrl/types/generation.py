"""Requests to a replica, their answers, and the statistics of a replica.

Shape letters: P prompt tokens, T response tokens, n tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from asyncrl.types.trajectories import FinishReason, PackedExtra, Segment, packed, packed_extra, unpacked_extra

PauseMode = Literal["abort", "keep", "drain"]

_NO_EXTRA: Mapping[str, np.ndarray] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. `temperature=0` is greedy; `top_p=1` and `top_k=0` switch those filters off.

    `stop_token_ids` end the response with finish_reason "stop"; the stop token is part of the response. Before
    `min_tokens` tokens they are barred from sampling, and log-probabilities are of the distribution without them.
    `json_schema` (a JSON schema as text) guides the response: only tokens that keep it valid are sampled. Engines
    without guided decoding refuse it.

    `experts`: chunks carry the routers' choices as `extra["experts"]`. Engines that do not record experts, and models
    without routers, refuse it.

    `kept`: chunks carry the tokens that the filters kept as `extra["kept_ids"]`. Needs `top_k` and a temperature above
    0.

    `score_from`: scores instead of sampling. The answer is one chunk of the prompt's tokens from this position, with
    log-probabilities at temperature 1 without filters, regardless of other fields. Engine sglang refuses it.
    `score_top`: with `score_from`, this many likeliest tokens per position, as `extra["top_ids"]` and
    `extra["top_logprobs"]`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    json_schema: str | None = None
    score_from: int | None = None
    score_top: int = 0
    experts: bool = False
    kept: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplingParams, _SAMPLING_FIELDS(self)


_SAMPLING_FIELDS = attrgetter(*(field.name for field in fields(SamplingParams)))


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """Token ids in, token ids out.

    `request_id` is unique per attempt to send it. The uniform draw for the token at absolute response position
    `i` depends only on `(seed, first_position + i)`, so a resumed request continues the same random stream:
    `first_position` is the number of response tokens that `prompt_ids` already ends with. `prompt_ids` is [P] int32.
    `sampling.max_tokens` is the remaining budget.
    """

    request_id: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    seed: int = 0
    first_position: int = 0
    session_id: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        rest = (self.sampling, self.seed, self.first_position, self.session_id)
        return _unpack_request, (self.request_id, packed(self.prompt_ids, np.int32), rest)


def _unpack_request(request_id: str, prompt_ids: bytes, rest: tuple[Any, ...]) -> GenerationRequest:
    return GenerationRequest(request_id, np.frombuffer(prompt_ids, np.int32), *rest)


class TokenChunk(NamedTuple):
    """Newly sampled tokens of one request, all by one policy version.

    `token_ids` [n] int32, `logprobs` [n] float32 (after temperature, top-k, top-p). `finish_reason` is None while
    the request continues; the final chunk may be empty. `error` is set instead of tokens when the request was refused.
    `bad_request`: every replica would refuse it (`errors.BadRequest`). `cached_tokens`, on the chunk that has a
    finish_reason: tokens of the prompt that were found in the KV cache. `extra`: further arrays by name, [n, ...] each,
    see `TOKEN_ARRAYS`.
    """

    request_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    version: int
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    bad_request: bool = False
    extra: Mapping[str, np.ndarray] = _NO_EXTRA

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = packed(self.token_ids, np.int32), packed(self.logprobs, np.float32)
        rest = (self.version, self.finish_reason, self.error, self.cached_tokens, self.bad_request)
        return _unpack_chunk, (self.request_id, *arrays, rest, packed_extra(self.extra) if self.extra else ())


def _unpack_chunk(
    request_id: str, token_ids: bytes, logprobs: bytes, rest: tuple[Any, ...], extra: PackedExtra
) -> TokenChunk:
    arrays = np.frombuffer(token_ids, np.int32), np.frombuffer(logprobs, np.float32)
    return TokenChunk(request_id, *arrays, *rest, extra=unpacked_extra(extra) if extra else _NO_EXTRA)


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """The policy's response to one prompt, over all attempts of the request.

    Attributes: prompt_ids: [P] int32. token_ids: [T] int32, sampled.
        logprobs: [T] float32.
        segments: they tile `[0, T)`.
        finish_reason: abort: the response will be resumed from these tokens; never in the result of a client or
            session.
        interruptions: times that the response was resumed after an abort by a publish or the loss of its replica.
        cached_tokens: prompt tokens in the KV cache of the first replica to finish an attempt.
        extra: further arrays by name, [T, ...] each, see `TOKEN_ARRAYS`; only arrays of all chunks.

    A checkpoint keeps neither `interruptions` nor `cached_tokens`.
    """

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    interruptions: int = 0
    cached_tokens: int = 0
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Requests `running` (decoding) and `waiting` (queued); `busy_s`: time with a running request. Counts since the
    start: `generated_tokens`; `preemptions`, requests evicted from the KV cache and computed again; `decode_steps`,
    model passes that sampled. None: not reported by the engine."""

    alive: bool
    running: int
    waiting: int
    version: int | None
    busy_s: float
    generated_tokens: int
    detail: str = ""
    preemptions: int | None = None
    decode_steps: int | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """`health` of the engine; `paused_s`: time that publishes closed the gate; `cpu_s`: of this process and its
    children; `node`: address of its machine, if known. `asleep_s`: time that the engine slept; `waking_s`: time to
    regain its memory; `external_tokens`: sampled since the start for external clients. `must_leave`: the process got
    SIGTERM and will be killed soon."""

    replica_id: int
    pid: int
    health: EngineHealth
    paused_s: float
    cpu_s: float
    node: str = ""
    asleep_s: float = 0.0
    waking_s: float = 0.0
    external_tokens: int = 0
    must_leave: bool = False
