"""The records that cross module boundaries. Frozen, slotted, numpy arrays; no dicts.

Shape letters: P prompt tokens, T response tokens (policy and environment together).

The records that travel by the hundred between processes say in `__reduce__` how: arrays as plain bytes, fields by
position. The default of a frozen dataclass looks its fields up one by one and costs several times as much.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

SegmentKind = Literal["policy", "environment"]
FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "keep", "drain"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, stop)` of a response that one source wrote.

    `version` is the policy version that sampled them, stamped by the replica; for `kind="environment"` it is the
    version of the policy segment before it and carries no meaning for staleness.
    """

    start: int
    stop: int
    version: int
    replica_id: int
    kind: SegmentKind = "policy"

    def __reduce__(self) -> tuple[Any, ...]:
        return Segment, (self.start, self.stop, self.version, self.replica_id, self.kind)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One attempt at a prompt.

    Attributes:
        prompt_ids: [P] int32.
        response_ids: [T] int32, tokens of the policy and, in multi-turn tasks, of the environment.
        logprobs: [T] float32, behaviour policy, as the replica reported at sampling time after temperature, top-k
            and top-p; 0 where the environment wrote the token.
        loss_mask: [T] bool, True where the policy wrote the token and it may be trained.
        segments: tile `[0, T)` in order; empty only when T is 0.
        reward: total reward; `reward_parts` its named components.
        started_s, finished_s: wall-clock seconds since the epoch.

    Example: prompt of 3 tokens, 5 sampled tokens, a publish of version 8 after the second one:
        prompt_ids=[5, 6, 7], response_ids=[9, 9, 4, 4, 2], logprobs=[-.1, -.2, -.1, -.3, -.1], loss_mask=[True] * 5,
        segments=(Segment(0, 2, version=7, replica_id=0), Segment(2, 5, version=8, replica_id=1))
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    segments: tuple[Segment, ...]
    reward: float
    reward_parts: tuple[tuple[str, float], ...] = ()
    finish_reason: FinishReason = "stop"
    turns: int = 1
    started_s: float = 0.0
    finished_s: float = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = (
            _packed(self.prompt_ids, np.int32),
            _packed(self.response_ids, np.int32),
            _packed(self.logprobs, np.float32),
            _packed(self.loss_mask, np.bool_),
        )
        rest = (self.segments, self.reward, self.reward_parts, self.finish_reason, self.turns)
        return _unpack_trajectory, (arrays, (*rest, self.started_s, self.finished_s))

    def normalized(self) -> Trajectory:
        """A copy with arrays of the right dtype and plain numbers, whatever an environment or reward gave.

        Raises ValueError: something is not an array, or not a number.
        """
        try:
            return replace(
                self,
                prompt_ids=np.asarray(self.prompt_ids, np.int32),
                response_ids=np.asarray(self.response_ids, np.int32),
                logprobs=np.asarray(self.logprobs, np.float32),
                loss_mask=np.asarray(self.loss_mask, np.bool_),
                segments=tuple(self.segments),
                reward=float(self.reward),
                reward_parts=tuple((str(name), float(value)) for name, value in self.reward_parts),
            )
        except (TypeError, AttributeError) as e:
            raise ValueError(f"malformed trajectory: {e}") from e

    def validate(self) -> Trajectory:
        """Returns self after checking the length relations. Raises ValueError naming the relation that fails."""
        n = len(self.response_ids)
        if len(self.prompt_ids) == 0:
            raise ValueError("prompt_ids is empty: a trajectory needs at least one prompt token")
        if len(self.logprobs) != n or len(self.loss_mask) != n:
            raise ValueError(f"response_ids {n}, logprobs {len(self.logprobs)}, loss_mask {len(self.loss_mask)} differ")
        at = 0
        for segment in self.segments:
            if segment.start != at or segment.stop <= segment.start:
                raise ValueError(f"segments do not tile [0, {n}): {segment} after {at}")
            if segment.kind == "environment" and bool(self.loss_mask[segment.start : segment.stop].any()):
                raise ValueError(f"loss_mask is set inside an environment segment: {segment}")
            at = segment.stop
        if at != n:
            raise ValueError(f"segments end at {at}, the response has {n} tokens")
        if not np.isfinite(self.reward):
            raise ValueError(f"reward is {self.reward}")
        return self

    def untrained(self) -> Trajectory:
        """A copy none of whose tokens is trained."""
        return replace(self, loss_mask=np.zeros(len(self.response_ids), np.bool_))

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among policy segments; None when the policy wrote nothing."""
        return min((s.version for s in self.segments if s.kind == "policy"), default=None)


def _packed(array: np.ndarray, dtype: type[np.generic]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _unpack_trajectory(arrays: tuple[bytes, bytes, bytes, bytes], rest: tuple[Any, ...]) -> Trajectory:
    prompt_ids, response_ids, logprobs, loss_mask = arrays
    return Trajectory(
        np.frombuffer(prompt_ids, np.int32),
        np.frombuffer(response_ids, np.int32),
        np.frombuffer(logprobs, np.float32),
        np.frombuffer(loss_mask, np.bool_),
        *rest,
    )


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryGroup:
    """The `group_size` trajectories of one prompt. `attempt` counts re-issues of the same ordinal, from 0."""

    ordinal: int
    attempt: int
    trajectories: tuple[Trajectory, ...]

    def validate(self) -> TrajectoryGroup:
        if not self.trajectories:
            raise ValueError(f"group {self.ordinal} has no trajectories")
        for trajectory in self.trajectories:
            trajectory.validate()
        return self

    @property
    def oldest_version(self) -> int | None:
        versions = [v for t in self.trajectories if (v := t.oldest_version) is not None]
        return min(versions, default=None)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to generate one group: `(ordinal, attempt)` names it, `version` is the one published at admission."""

    ordinal: int
    attempt: int
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One call of an environment to the policy, as far as it had come.

    `prompt_ids` [P] int32, what was asked; `token_ids` [T] int32, `logprobs` [T] float32 and `segments`, which tile
    `[0, T)`, what had been sampled. `finish_reason` is None while the response goes on.
    """

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    segments: tuple[Segment, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PartialTrajectory:
    """A trajectory that was being generated: `done` when it was complete, else its calls in order, the last one perhaps
    unfinished. Replaying them to the environment brings it to the state that it had."""

    calls: tuple[RecordedCall, ...] = ()
    done: Trajectory | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PartialGroup:
    """What a checkpoint keeps of a running group: one entry per trajectory, in their order.

    `ticket` is the one under which the tokens were sampled; its version bounds theirs from below.
    """

    ticket: Ticket
    trajectories: tuple[PartialTrajectory, ...]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens that it holds."""
        return sum(
            len(t.done.response_ids) if t.done else sum(len(c.token_ids) for c in t.calls) for t in self.trajectories
        )


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """What the rollout side is to do: generate `tickets`, and give up `cancelled`, whose groups have ended.

    `partials`: what a checkpoint kept of groups among `tickets`, under the ticket of now; the rest starts anew.
    """

    tickets: tuple[Ticket, ...] = ()
    cancelled: tuple[Ticket, ...] = ()
    partials: tuple[PartialGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """What packing needs to know of a trajectory: token counts, and how many of them are trained."""

    prompt: int
    response: int
    trained: int

    @property
    def total(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A leased group without its tokens, for planning: one entry per trajectory in `lengths` and `rewards`.

    `lag_sum`, `lag_max`, `trained_tokens` are over the tokens of the group that will be trained; lags in optimizer
    steps at the leasing step. `lag_in_flight_sum` is the part that arose before the group was put. `masked_tokens` were
    sampled by the policy and are not trained because they are over the limit. `truncated` trajectories were cut off at
    their token limit. `reward_parts`: the mean of each, over the trajectories that have it.
    """

    ordinal: int
    attempt: int
    lengths: tuple[Lengths, ...]
    rewards: tuple[float, ...]
    lag_sum: int
    lag_max: int
    lag_in_flight_sum: int
    trained_tokens: int
    segments: int
    interrupted: int
    masked_tokens: int = 0
    truncated: int = 0
    reward_parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseManifest:
    """The groups that step `step` trains, oldest deadline first. `overdue_wait_s`: time spent on mandatory ones."""

    step: int
    groups: tuple[GroupSummary, ...]
    overdue_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature=0` is greedy; `top_p=1` and `top_k=0` switch those filters off.

    `stop_token_ids` end the response with finish_reason "stop"; the stop token is part of the response. Before
    `min_tokens` tokens none of them can be sampled; the log-probabilities are those of the distribution without them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        rest = (self.max_tokens, self.stop_token_ids, self.min_tokens)
        return SamplingParams, (self.temperature, self.top_p, self.top_k, *rest)


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
        return _unpack_request, (self.request_id, _packed(self.prompt_ids, np.int32), rest)


def _unpack_request(request_id: str, prompt_ids: bytes, rest: tuple[Any, ...]) -> GenerationRequest:
    return GenerationRequest(request_id, np.frombuffer(prompt_ids, np.int32), *rest)


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """Newly sampled tokens of one request, all by one policy version.

    `token_ids` [n] int32, `logprobs` [n] float32 (after temperature, top-k, top-p). `finish_reason` is None while
    the request goes on; the final chunk may be empty. `error` is set instead of tokens when the request was refused.
    `cached_tokens`, on the chunk that has a finish_reason: tokens of the prompt whose KV cache was there already.
    """

    request_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    version: int
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = _packed(self.token_ids, np.int32), _packed(self.logprobs, np.float32)
        rest = (self.version, self.finish_reason, self.error, self.cached_tokens)
        return _unpack_chunk, (self.request_id, *arrays, rest)


def _unpack_chunk(request_id: str, token_ids: bytes, logprobs: bytes, rest: tuple[Any, ...]) -> TokenChunk:
    return TokenChunk(request_id, np.frombuffer(token_ids, np.int32), np.frombuffer(logprobs, np.float32), *rest)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype (torch's name without the prefix, e.g. "bfloat16") of one weight tensor in HF naming."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Bytes `[offset, offset + nbytes)` of tensor number `tensor`, placed at `bucket_offset` of its bucket."""

    tensor: int
    offset: int
    nbytes: int
    bucket_offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One unit of transfer: `nbytes` bytes holding `slices` at 16-byte aligned offsets."""

    index: int
    nbytes: int
    slices: tuple[TensorSlice, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one publish sends. Built by `weights.plan.plan_buckets`; equal on both sides.

    `version` None leaves the replicas' version as it is. `verify`: whether both sides compute the digest.
    """

    publish_id: int
    version: int | None
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    verify: bool = True

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One trajectory as a trainer rank consumes it: where to fetch it, its advantage (its reward, where advantages are
    made token by token) and `token_weight`, the share of the update's objective that each of its trained tokens has."""

    ordinal: int
    index: int
    advantage: float
    lengths: Lengths
    token_weight: float = 0.0


Microbatch = tuple[TrainSequence, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """What one rank does in one step: its micro-batches, update by update.

    Every rank has the same number of updates, and of micro-batches in each. `ordinals`: the groups to fetch.
    """

    step: int
    updates: tuple[tuple[Microbatch, ...], ...]
    ordinals: tuple[int, ...] = field(default=())

    @property
    def microbatches(self) -> tuple[Microbatch, ...]:
        """Those of all updates, in order."""
        return tuple(microbatch for update in self.updates for microbatch in update)
