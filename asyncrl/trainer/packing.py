"""Which rank trains which trajectory, in which micro-batch. Pure: the same lease gives the same plan everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.types import LeaseManifest, RankPlan, TrainSequence

Microbatch = tuple[TrainSequence, ...]


def plan_step(
    manifest: LeaseManifest,
    advantages: Sequence[np.ndarray],
    *,
    num_ranks: int,
    max_tokens_per_microbatch: int,
) -> tuple[RankPlan, ...]:
    """One plan per rank; together they hold every trajectory of the lease exactly once.

    Tokens are balanced over ranks greedily, longest sequence first to the rank with the fewest tokens: two ranks
    differ by at most one sequence. A rank's sequences are sorted by length and cut into runs within the budget, because
    attention is padded to the longest sequence of a micro-batch. All ranks get the same number of micro-batches, since
    every forward pass is collective; a rank with too few sequences gets empty ones.

    Args:
        advantages: one [G] array per group of the manifest, finite.
        max_tokens_per_microbatch: prompt and response tokens of one forward pass.

    Returns:
        Plans in rank order. `normalizer` is the global number of trained tokens, at least 1.

    Raises:
        ValueError: a sequence longer than the budget; advantages that do not match the groups or are not finite.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}")
    sequences = _sequences(manifest, advantages)
    for s in sequences:
        if s.lengths.total > max_tokens_per_microbatch:
            raise ValueError(
                f"trajectory {s.index} of group {s.ordinal} has {s.lengths.total} tokens, over "
                f"max_tokens_per_microbatch={max_tokens_per_microbatch}; a sequence is never split"
            )
    ranks = [_runs(rank, max_tokens_per_microbatch) for rank in _balance(sequences, num_ranks)]
    count = max(1, *(len(runs) for runs in ranks))
    normalizer = float(max(1, sum(s.lengths.trained for s in sequences)))
    return tuple(
        RankPlan(
            step=manifest.step,
            microbatches=tuple(_spread(runs, count)),
            normalizer=normalizer,
            ordinals=tuple(sorted({s.ordinal for run in runs for s in run})),
        )
        for runs in ranks
    )


@dataclass(frozen=True, slots=True)
class PackingStatistics:
    """`attention_fill`: real tokens over positions that padded attention computes; `rank_balance`: mean over maximum
    of the ranks' tokens. 1 is perfect for both. `microbatches`: per rank."""

    attention_fill: float
    rank_balance: float
    microbatches: int


def packing_statistics(plans: Sequence[RankPlan]) -> PackingStatistics:
    filled = [run for plan in plans for run in plan.microbatches if run]
    tokens = [sum(s.lengths.total for run in plan.microbatches for s in run) for plan in plans]
    positions = sum(len(run) * max(s.lengths.total for s in run) for run in filled)
    return PackingStatistics(
        attention_fill=sum(tokens) / positions if positions else 1.0,
        rank_balance=sum(tokens) / len(tokens) / max(tokens) if any(tokens) else 1.0,
        microbatches=len(plans[0].microbatches),
    )


def _sequences(manifest: LeaseManifest, advantages: Sequence[np.ndarray]) -> list[TrainSequence]:
    if len(advantages) != len(manifest.groups):
        raise ValueError(f"{len(advantages)} advantage arrays for {len(manifest.groups)} groups")
    sequences = []
    for group, values in zip(manifest.groups, advantages, strict=True):
        if np.shape(values) != (len(group.lengths),):
            raise ValueError(
                f"advantages of group {group.ordinal} have shape {np.shape(values)}, not ({len(group.lengths)},)"
            )
        for index, (lengths, value) in enumerate(zip(group.lengths, values, strict=True)):
            if not math.isfinite(value):
                raise ValueError(f"advantage of trajectory {index} of group {group.ordinal} is {value}")
            sequences.append(TrainSequence(group.ordinal, index, float(value), lengths))
    return sequences


def _balance(sequences: list[TrainSequence], num_ranks: int) -> list[list[TrainSequence]]:
    """Longest-processing-time-first; each rank's list comes out longest first."""
    ranks: list[list[TrainSequence]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for s in sorted(sequences, key=lambda s: (-s.lengths.total, s.ordinal, s.index)):
        rank = min(range(num_ranks), key=lambda r: (tokens[r], r))
        ranks[rank].append(s)
        tokens[rank] += s.lengths.total
    return ranks


def _runs(sequences: list[TrainSequence], budget: int) -> list[Microbatch]:
    """Cuts a list sorted by length into consecutive runs of at most `budget` tokens."""
    runs: list[list[TrainSequence]] = []
    room = 0
    for s in sequences:
        if s.lengths.total > room:
            runs.append([])
            room = budget
        runs[-1].append(s)
        room -= s.lengths.total
    return [tuple(run) for run in runs]


def _spread(runs: list[Microbatch], count: int) -> list[Microbatch]:
    """Exactly `count` micro-batches: halves the one with most tokens (less memory at no cost, since the other ranks
    are as long), and appends empty ones when every sequence stands alone."""
    runs = list(runs)
    while len(runs) < count:
        widest = max(
            (i for i, run in enumerate(runs) if len(run) > 1),
            key=lambda i: sum(s.lengths.total for s in runs[i]),
            default=None,
        )
        if widest is None:
            runs.append(())
            continue
        middle = len(runs[widest]) // 2
        runs[widest : widest + 1] = [runs[widest][:middle], runs[widest][middle:]]
    return runs
