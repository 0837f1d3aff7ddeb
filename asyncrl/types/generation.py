"""Requests to a replica, their answers, and the statistics of a replica.

Shape letters: P prompt tokens, T response tokens, n tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    `min_tokens` tokens none of them can be sampled; the log-probabilities are those of the distribution without them.
    `json_schema` (a JSON schema as text) guides the response: only tokens that keep it valid are sampled. Engines
    without guided decoding refuse it.

    `experts`: the chunks also have the experts that the routers of a mixture chose, as `experts` of their `extra`.
    Engines that do not record them, and models without routers, refuse it.

    `kept`: the chunks also have the tokens that the filters kept, as `kept_ids` of their `extra`. It needs `top_k`,
    which bounds them, and a temperature above 0.

    `score_from`: nothing is sampled. The answer is one chunk with the tokens of the prompt from this place on, and
    their log-probabilities under the model, at temperature 1 and without filters, whatever the other fields say. Engine
    sglang refuses it. `score_top`, with it: the chunk also has this many likeliest tokens of each place, as `top_ids`
    and `top_logprobs` of its `extra`.
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
        rest = (self.max_tokens, self.stop_token_ids, self.min_tokens, self.json_schema, self.score_from)
        return SamplingParams, (
            self.temperature,
            self.top_p,
            self.top_k,
            *rest,
            self.score_top,
            self.experts,
            self.kept,
        )


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

    Attributes:
        prompt_ids: [P] int32, what was asked.
        token_ids: [T] int32, what was sampled.
        logprobs: [T] float32.
        segments: they tile `[0, T)`.
        finish_reason: abort while the response is to be resumed from these tokens. What a client or a session returns
            has ended.
        interruptions: times that it was aborted by a publish or lost its replica, and was resumed.
        cached_tokens: of the prompt, those that the first replica to finish an attempt found in its KV cache.
        extra: further arrays by name, [T, ...] each, see `TOKEN_ARRAYS`; only those that all chunks had.

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
    """`running` decode now, `waiting` are queued; `busy_s` is the time spent with at least one running request;
    `generated_tokens` counts since start, and so does `preemptions`: requests that the engine took out of its KV cache
    to make room, and computes again; and `decode_steps`: passes of the model that sampled. None: the engine does not
    say."""

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
    """`health` of the engine; `paused_s`: time the gate was closed by publishes; `cpu_s`: of this process and
    those below it; `node`: address of its machine, where it is known. `asleep_s`: time that the engine slept;
    `waking_s`: time that it took to take its memory back; `external_tokens`: sampled since its start for requests from
    outside the run. `must_leave`: its process was asked to end (SIGTERM), and will be killed soon."""

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
