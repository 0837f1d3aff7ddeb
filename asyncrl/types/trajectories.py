"""Sampled trajectories, which the rollouter makes and the trainer trains.

Shape letters: P prompt tokens, T response tokens (policy and environment together).

Records that are sent by the hundred define `__reduce__`: arrays as plain bytes, fields by position. The default of
frozen dataclasses, which looks up each field, is several times slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

_DTYPES = (np.dtype(np.int32), np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_))
"""Of prompt ids, response ids, log-probabilities and loss mask."""

SegmentKind = Literal["policy", "environment"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenArray:
    """An array with one row of finite entries per token.

    Attributes:
        dims: names of the dimensions after the first, the same in all rows of a run.
        least: smallest entry of an integer array.
        absent: entry of tokens without a value, e.g. of an environment; None: every token has one.
    """

    dtype: type[np.generic]
    dims: tuple[str, ...] = ()
    least: int | None = None
    absent: int | None = None


TOKEN_ARRAYS: Mapping[str, TokenArray] = MappingProxyType(
    {
        "teacher_logprobs": TokenArray(np.float32),
        "top_ids": TokenArray(np.int32, ("k",), least=0),
        "top_logprobs": TokenArray(np.float32, ("k",)),
        "experts": TokenArray(np.int16, ("layers", "k"), least=-1, absent=-1),
        "kept_ids": TokenArray(np.int32, ("k",), least=-1, absent=-1),
    }
)
"""The arrays that `extra` of a chunk, a generation or a trajectory may hold, one row per response token.

teacher_logprobs: log-probability of the token under the teacher of `algorithm.distillation`, at temperature 1. top_ids,
top_logprobs: the k likeliest tokens at this position under the scoring model (in a trajectory, the teacher), likeliest
first, with log-probabilities at temperature 1. experts: what the routers of a mixture chose for the token before it,
whose hidden state predicted it: k experts in each layer that has them, in the order of the layers; -1 where nothing was
recorded. kept_ids: the tokens that top-k and top-p kept where the token was sampled, itself among them, likeliest
first; then -1.
"""


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
        extra: further arrays by name, [T, ...] each, see `TOKEN_ARRAYS`.
        started_s, finished_s: wall-clock seconds since the epoch.
        branches: the policy's replies outside this conversation. A branch's prompt is its whole context, rendered or
            sampled in another branch, so that every sampled token is in exactly one response. A branch has no branches,
            reward or parts.

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
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    branches: tuple[Trajectory, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = map(packed, (self.prompt_ids, self.response_ids, self.logprobs, self.loss_mask), _DTYPES)
        rest = (self.segments, self.reward, self.reward_parts, self.finish_reason, self.turns)
        times = self.started_s, self.finished_s
        return _unpack_trajectory, (tuple(arrays), (*rest, *times), packed_extra(self.extra), self.branches)

    def normalized(self) -> Trajectory:
        """Itself, or a copy with arrays of the right dtypes and plain numbers.

        Raises ValueError: something is not an array, or not a number, or `extra` has an unknown name.
        """
        if self._is_normal:
            return self
        if unknown := self.extra.keys() - TOKEN_ARRAYS.keys():
            raise ValueError(f"extra has {sorted(unknown)}; a trajectory may have {sorted(TOKEN_ARRAYS)}")
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
                extra={name: np.asarray(array, TOKEN_ARRAYS[name].dtype) for name, array in self.extra.items()},
                branches=tuple(branch.normalized() for branch in self.branches),
            )
        except (TypeError, AttributeError) as e:
            raise ValueError(f"malformed trajectory: {e}") from e

    @property
    def _is_normal(self) -> bool:
        """Fast check that is True for most trajectories; False is inconclusive."""
        arrays = self.prompt_ids, self.response_ids, self.logprobs, self.loss_mask
        return (
            all(type(array) is np.ndarray for array in arrays)
            and tuple(array.dtype for array in arrays) == _DTYPES
            and type(self.segments) is tuple
            and type(self.reward) is float
            and type(self.reward_parts) is tuple
            and all(type(p) is tuple and tuple(map(type, p)) == (str, float) for p in self.reward_parts)
            and not self.extra
            and not self.branches
        )

    def validate(self) -> Trajectory:
        """Checks the length relations and returns self. Raises ValueError naming the failed relation."""
        n = len(self.response_ids)
        if len(self.prompt_ids) == 0:
            raise ValueError("prompt_ids is empty: a trajectory needs at least one prompt token")
        if len(self.logprobs) != n or len(self.loss_mask) != n:
            raise ValueError(f"response_ids {n}, logprobs {len(self.logprobs)}, loss_mask {len(self.loss_mask)} differ")
        check_extra(self.extra, n)
        at = 0
        for segment in self.segments:
            if segment.start != at or segment.stop <= segment.start:
                raise ValueError(f"segments do not tile [0, {n}): {segment} after {at}")
            if segment.kind == "environment" and bool(self.loss_mask[segment.start : segment.stop].any()):
                raise ValueError(f"loss_mask is set inside an environment segment: {segment}")
            at = segment.stop
        if at != n:
            raise ValueError(f"segments end at {at}, the response has {n} tokens")
        if not math.isfinite(self.reward):
            raise ValueError(f"reward is {self.reward}")
        for branch in self.branches:
            if branch.validate().branches or branch.reward or branch.reward_parts:
                raise ValueError("a branch has branches or a reward of its own: the trajectory has them")
        return self

    def untrained(self) -> Trajectory:
        """A copy without trained tokens, branches included."""
        branches = tuple(branch.untrained() for branch in self.branches)
        return replace(self, loss_mask=np.zeros(len(self.response_ids), np.bool_), branches=branches)

    @property
    def sequences(self) -> tuple[Trajectory, ...]:
        """The sequences that the trainer computes: the trajectory, then its branches."""
        return (self, *self.branches)

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def policy_ids(self) -> np.ndarray:
        """[n] int32: tokens of the response that the policy wrote, trained or not."""
        written = [self.response_ids[s.start : s.stop] for s in self.segments if s.kind == "policy"]
        return np.concatenate(written) if written else self.response_ids[:0]

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among policy segments; None when the policy wrote nothing."""
        return min((s.version for s in self.segments if s.kind == "policy"), default=None)


def packed(array: np.ndarray, dtype: type[np.generic] | np.dtype) -> bytes:
    """The array's bytes as `dtype`."""
    return array.astype(dtype, copy=False).tobytes()


PackedExtra = tuple[tuple[str, tuple[int, ...], bytes], ...]
"""(name, shape, entries) of each array of an `extra`."""


def packed_extra(extra: Mapping[str, np.ndarray]) -> PackedExtra:
    return tuple((name, array.shape, packed(array, TOKEN_ARRAYS[name].dtype)) for name, array in extra.items())


def unpacked_extra(extra: PackedExtra) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(entries, TOKEN_ARRAYS[name].dtype).reshape(shape) for name, shape, entries in extra}


def check_extra(extra: Mapping[str, np.ndarray], num_tokens: int) -> None:
    """Raises ValueError, naming the array: it does not have `num_tokens` rows, or its rows are not as declared."""
    for name, array in extra.items():
        declared = TOKEN_ARRAYS[name]
        if array.ndim != 1 + len(declared.dims) or len(array) != num_tokens:
            expected = ", ".join((str(num_tokens), *declared.dims))
            raise ValueError(
                f"extra[{name!r}] has shape {list(array.shape)}, and {num_tokens} tokens need [{expected}]"
            )
        if not np.isfinite(array).all() or (declared.least is not None and (array < declared.least).any()):
            raise ValueError(f"extra[{name!r}] has an entry that is not finite, or below {declared.least}")


def _unpack_trajectory(
    arrays: tuple[bytes, bytes, bytes, bytes],
    rest: tuple[Any, ...],
    extra: PackedExtra = (),
    branches: tuple[Trajectory, ...] = (),
) -> Trajectory:
    ids, response_ids, logprobs, mask = map(np.frombuffer, arrays, _DTYPES)
    own = {"extra": unpacked_extra(extra), "branches": branches}
    return Trajectory(ids, response_ids, logprobs, mask, *rest, **own)


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
    def sequences(self) -> tuple[Trajectory, ...]:
        """The trajectories, in order, then the branches of the first one, of the second one, and so on."""
        return (*self.trajectories, *(branch for t in self.trajectories for branch in t.branches))

    @property
    def owners(self) -> tuple[int, ...]:
        """For each of `sequences` the index of its trajectory."""
        branches = (i for i, t in enumerate(self.trajectories) for _ in t.branches)
        return (*range(len(self.trajectories)), *branches)

    @property
    def oldest_version(self) -> int | None:
        versions = [v for t in self.sequences if (v := t.oldest_version) is not None]
        return min(versions, default=None)
