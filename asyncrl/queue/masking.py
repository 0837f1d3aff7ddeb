"""Which tokens of a group a step may train. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from asyncrl.errors import LedgerError
from asyncrl.types import GroupSummary, Lengths, Segment, TokenLag, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A ready or leased group; `put_version`: the version published when it was put.

    `at_put`: its summary as step 0 would train it, with lags below 0. Computed at the put, since the trainer waits for
    a lease and not for a put."""

    group: TrajectoryGroup
    put_version: int
    at_put: GroupSummary = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_put", _summary(self.group, self.put_version))


def mask_older(group: TrajectoryGroup, version: int) -> TrajectoryGroup:
    """`group` with the loss mask cleared for versions before `version`; the same object if there are no such tokens."""
    trajectories = tuple(_mask_older(t, version) for t in group.trajectories)
    if all(new is old for new, old in zip(trajectories, group.trajectories, strict=True)):
        return group
    return replace(group, trajectories=trajectories)


def oldest_trained(group: TrajectoryGroup, version: int) -> int | None:
    """The version of the oldest token that is still trained when versions before `version` are masked. None: no trained
    token remains. A group that never had a trained token gives `version`."""
    versions = [segment.version for s in group.sequences for segment, _ in _trained(s)]
    return min((v for v in versions if v >= version), default=None) if versions else version


def summarize(stored: StoredGroup, leased: TrajectoryGroup, *, step: int, max_lag: int) -> GroupSummary:
    """The planner's summary of a leased group.

    Args:
        stored: the group as it was put; `leased`: as `step` trains it, with late tokens masked.

    Raises LedgerError: a token would be trained with a lag over `max_lag`.
    """
    whole = stored.at_put
    summary = whole if leased is stored.group else _summary(leased, stored.put_version)
    lags = tuple(TokenLag(p.trajectory, step + p.lag, p.in_flight, p.tokens) for p in summary.lags)
    masked = whole.trained_tokens - summary.trained_tokens
    found = replace(summary, lags=lags, masked_tokens=masked)
    if found.lag_max > max_lag:
        raise LedgerError(
            f"step {step} would train a token of group {leased.ordinal} with lag {found.lag_max} > {max_lag}"
        )
    return found


def _summary(group: TrajectoryGroup, put_version: int) -> GroupSummary:
    # Lags are relative to step 0; `summarize` shifts them to the step of the lease.
    lags, lengths = [], []
    for owner, sequence in zip(group.owners, group.sequences, strict=True):
        parts = [
            TokenLag(owner, -segment.version, put_version - segment.version, count)
            for segment, count in _trained(sequence)
        ]
        trained = sum(part.tokens for part in parts)
        lengths.append(Lengths(len(sequence.prompt_ids), len(sequence.response_ids), trained))
        lags += parts
    spans = [_version_span(t) for t in group.trajectories]
    return GroupSummary(
        ordinal=group.ordinal,
        attempt=group.attempt,
        lengths=tuple(lengths),
        rewards=tuple(t.reward for t in group.trajectories),
        lags=tuple(lags),
        segments=sum(len(s.segments) for s in group.sequences),
        interrupted=sum(span > 0 for span in spans),
        version_span=sum(spans),
        continued_tokens=sum(map(_continued_tokens, group.sequences)),
        truncated=sum(t.finish_reason == "length" for t in group.trajectories),
        reward_parts=_mean_parts(group),
        owners=group.owners,
    )


def _mean_parts(group: TrajectoryGroup) -> tuple[tuple[str, float], ...]:
    values: dict[str, list[float]] = {}
    for name, value in (part for t in group.trajectories for part in t.reward_parts):
        values.setdefault(name, []).append(value)
    return tuple((name, float(np.mean(found))) for name, found in values.items())


def _trained(sequence: Trajectory) -> Iterator[tuple[Segment, int]]:
    """The policy's segments with tokens in the loss, and their number of such tokens."""
    for segment in sequence.segments:
        if segment.kind == "policy" and (
            count := int(np.count_nonzero(sequence.loss_mask[segment.start : segment.stop]))
        ):
            yield segment, count


def _version_span(trajectory: Trajectory) -> int:
    versions = [s.version for sequence in trajectory.sequences for s in sequence.segments if s.kind == "policy"]
    return max(versions, default=0) - min(versions, default=0)


def _continued_tokens(trajectory: Trajectory) -> int:
    """Trained tokens that directly follow tokens of an older version from the same replica."""
    tokens, run = 0, None
    for segment in trajectory.segments:
        if segment.kind != "policy":
            run = None
        elif run is None or run.replica_id != segment.replica_id:
            run = segment
        elif segment.version > run.version:
            tokens += int(np.count_nonzero(trajectory.loss_mask[segment.start : segment.stop]))
    return tokens


def _mask_older(trajectory: Trajectory, version: int) -> Trajectory:
    branches = tuple(_mask_older(branch, version) for branch in trajectory.branches)
    old = [segment for segment, _ in _trained(trajectory) if segment.version < version]
    if not old and all(new is was for new, was in zip(branches, trajectory.branches, strict=True)):
        return trajectory
    loss_mask = trajectory.loss_mask.copy()
    for segment in old:
        loss_mask[segment.start : segment.stop] = False
    return replace(trajectory, loss_mask=loss_mask, branches=branches)
