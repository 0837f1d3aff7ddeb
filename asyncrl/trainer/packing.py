"""Decides which data-parallel rank trains which sequence (a trajectory or a branch) in which micro-batch.

Pure: a lease always gives the same plans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncrl.types import LeaseManifest, Microbatch, RankPlan, TrainSequence

if TYPE_CHECKING:
    from asyncrl.config.recipe import Recipe

FAMILIES_PER_RANK = 8
"""With this many parts of groups per rank, the ranks' token sums differ little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRules:
    """`num_plans`: data-parallel size. `max_tokens_per_microbatch`: prompt and response tokens of one forward pass.
    `num_minibatches`: updates per epoch, among which groups are distributed at random. `num_epochs`: passes over the
    lease. `seed`: of the run. `fixed_tokens`: divisor of aggregation fixed. `share_prompts`: sequences of a group in
    one micro-batch share the computation of their prompt. `fills`: micro-batches are filled regardless of length, for
    attention without padding. `pads`: a micro-batch has as many tokens as its sequences times the longest.
    `skips_silent`: sequences with advantage 0 have gradient 0 and micro-batches of their own."""

    num_plans: int
    max_tokens_per_microbatch: int
    num_minibatches: int = 1
    num_epochs: int = 1
    seed: int = 0
    aggregation: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"
    fixed_tokens: int = 1
    share_prompts: bool = False
    fills: bool = False
    pads: bool = False
    skips_silent: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> PackingRules:
        return cls(
            num_plans=recipe.trainer.layout.num_plans,
            max_tokens_per_microbatch=recipe.max_tokens_per_microbatch,
            num_minibatches=recipe.batch.num_minibatches,
            num_epochs=recipe.batch.num_epochs,
            seed=recipe.run.seed,
            aggregation=recipe.algorithm.aggregation,
            fixed_tokens=recipe.algorithm.fixed_tokens or recipe.longest_response_tokens,
            share_prompts=_shares_prompts(recipe),
            fills=_pads_nothing(recipe) and not _shares_prompts(recipe),
            pads=recipe.trainer.packing == "padded",
            skips_silent=recipe.trainer.backend == "fsdp" and recipe.algorithm.learns_by_advantage,
        )


def _shares_prompts(recipe: Recipe) -> bool:
    """True where every rank shares prompts; ranks balanced by shared tokens would otherwise differ in work."""
    fsdp = recipe.trainer.fsdp
    is_packed = fsdp.attention in ("packed_sdpa", "varlen") or (fsdp.attention == "auto" and not _may_flash(recipe))
    return (
        recipe.trainer.backend == "fsdp"
        and recipe.trainer.packing != "padded"
        and fsdp.share_prompts
        and is_packed
        and recipe.algorithm.router_aux_coefficient == 0
    )


def _pads_nothing(recipe: Recipe) -> bool:
    """True where every rank attends without padding: flash-attn, or torch's varlen kernel."""
    fsdp = recipe.trainer.fsdp
    is_unpadded = fsdp.attention in ("varlen", "flash_attention_2") or (fsdp.attention == "auto" and _may_flash(recipe))
    return recipe.trainer.backend == "fsdp" and is_unpadded and recipe.trainer.packing != "padded"


def _may_flash(recipe: Recipe) -> bool:
    trainer, fsdp = recipe.trainer, recipe.trainer.fsdp
    return fsdp.param_dtype == "bfloat16" and trainer.device != "cpu" and fsdp.context_parallel == 1


def plan_step(manifest: LeaseManifest, advantages: Sequence[np.ndarray], rules: PackingRules) -> tuple[RankPlan, ...]:
    """One plan per data-parallel index; in each epoch the plans together hold every sequence of the lease exactly once.
    The sequences of a group are trained in the same update.

    Every epoch redraws the groups of each update, from the seed of the run and the step. The lease itself is in order
    of deadlines: cut as it is, the first update would get the oldest groups, which are often the longest.

    Balance over ranks: greedy, longest sequence first to the rank with the fewest tokens, so two ranks differ by at
    most one sequence. Micro-batches: a rank's sequences are sorted by length and cut into runs within the budget,
    because attention pads similar sequences to the longest of them (`length_classes`); with `fills`, best fit instead.
    With `share_prompts`, families of sequences of a group replace single sequences in the balance, with the tokens of
    their prompt counted once; the budget still counts every token of every sequence. All ranks get the same number of
    micro-batches, since every forward pass is collective; a rank with too few sequences gets empty micro-batches.

    Args:
        advantages: one [G] array per group of the manifest, finite; a branch has its trajectory's advantage.

    Returns:
        Plans in the order of the indices. The `token_weight` of the trained tokens of an update sums to 1, unless
        nothing is trained or aggregation is fixed:

        token_mean      all equal
        sequence_mean   equal within a trajectory and its branches, summing to 1 / (trajectories with a trained token)
        fixed           each 1 / (trajectories * fixed_tokens): the divisor depends on the recipe alone

    Raises:
        ValueError: a sequence longer than the budget; advantages that do not match the groups or are not finite.
    """
    if rules.num_plans < 1:
        raise ValueError(f"num_plans is {rules.num_plans}")
    sequences = _sequences(manifest, advantages)
    for s in (s for group in sequences for s in group):
        if s.lengths.total > rules.max_tokens_per_microbatch:
            raise ValueError(
                f"sequence {s.index} of group {s.ordinal} has {s.lengths.total} tokens, over "
                f"max_tokens_per_microbatch={rules.max_tokens_per_microbatch}; a sequence is never split"
            )
    updates = [_update(part, rules) for part in _minibatches(sequences, manifest.step, rules)]
    return tuple(
        RankPlan(
            step=manifest.step,
            updates=tuple(update[rank] for update, _ in updates),
            silent=tuple(silent for _, silent in updates),
        )
        for rank in range(rules.num_plans)
    )


def _minibatches(groups: list[list[TrainSequence]], step: int, rules: PackingRules) -> Iterator[list[TrainSequence]]:
    """The sequences of each update. The same set of groups is cut the same way in any order."""
    draw = np.random.default_rng([rules.seed, step])
    bounds = np.linspace(0, len(groups), rules.num_minibatches + 1).round().astype(int)
    ordered = sorted(groups, key=lambda group: group[0].ordinal) if rules.num_minibatches > 1 else groups
    for _ in range(rules.num_epochs):
        places = draw.permutation(len(groups)) if rules.num_minibatches > 1 else range(len(groups))
        for start, stop in pairwise(bounds):
            yield [s for place in places[start:stop] for s in ordered[place]]


def _update(sequences: list[TrainSequence], rules: PackingRules) -> tuple[list[tuple[Microbatch, ...]], int]:
    """The micro-batches of each rank, and how many of the first are silent."""
    weigh = _token_weight(sequences, rules)
    weighed = [replace(s, token_weight=weigh(s)) for s in sequences]
    taught = [s for s in weighed if s.advantage or not rules.skips_silent]
    if len(taught) in (0, len(weighed)):  # one backward pass at least, for the gradient 0
        return _packed(weighed, rules), 0
    silent = _packed([s for s in weighed if not s.advantage], rules)
    # They come first: the last pass of an update must be a backward pass, which frees the gathered weights.
    parts = zip(silent, _packed(taught, rules), strict=True)
    return [(*first, *rest) for first, rest in parts], len(silent[0])


def _packed(sequences: list[TrainSequence], rules: PackingRules) -> list[tuple[Microbatch, ...]]:
    """The micro-batches of each rank, equally many."""
    families = _families(sequences, rules.num_plans) if rules.share_prompts else [[s] for s in sequences]
    cut = _filled if rules.fills else partial(_runs, pads=rules.pads)
    ranks = [cut(rank, rules.max_tokens_per_microbatch) for rank in _balance(families, rules.num_plans)]
    # The fullest rank sets the count for all: forward passes are collective.
    count = max(1, *(len(runs) for runs in ranks))
    return [tuple(_spread(runs, count)) for runs in ranks]


def _token_weight(sequences: list[TrainSequence], rules: PackingRules) -> Callable[[TrainSequence], float]:
    trained: Counter[tuple[int, int]] = Counter()
    """Trained tokens of each trajectory of the update, over its branches."""
    for s in sequences:
        trained[s.ordinal, s.owner] += s.lengths.trained
    everything, learning, tokens = max(1, len(trained)), sum(n > 0 for n in trained.values()), max(1, trained.total())
    match rules.aggregation:
        case "token_mean":
            return lambda s: 1 / tokens
        case "sequence_mean":
            return lambda s: 1 / (learning * own) if (own := trained[s.ordinal, s.owner]) else 0.0
        case "fixed":
            return lambda s: 1 / (everything * rules.fixed_tokens)


def _sequences(manifest: LeaseManifest, advantages: Sequence[np.ndarray]) -> list[list[TrainSequence]]:
    """The sequences of each group."""
    if len(advantages) != len(manifest.groups):
        raise ValueError(f"{len(advantages)} advantage arrays for {len(manifest.groups)} groups")
    sequences = []
    for group, values in zip(manifest.groups, advantages, strict=True):
        if np.shape(values) != (len(group.rewards),):
            raise ValueError(
                f"advantages of group {group.ordinal} have shape {np.shape(values)}, not ({len(group.rewards)},)"
            )
        sequences.append([])
        for index, (owner, lengths) in enumerate(zip(group.owners, group.lengths, strict=True)):
            if not math.isfinite(value := float(values[owner])):
                raise ValueError(f"advantage of trajectory {owner} of group {group.ordinal} is {value}")
            sequences[-1].append(TrainSequence(group.ordinal, index, value, lengths, owner))
    return sequences


def _families(sequences: list[TrainSequence], num_plans: int) -> list[list[TrainSequence]]:
    """Splits each group into as few parts as give every rank `FAMILIES_PER_RANK` of them, so that ranks can be
    balanced; one part if there is one rank. A part has its longest sequences first."""
    groups: dict[int, list[TrainSequence]] = {}
    for s in sequences:
        groups.setdefault(s.ordinal, []).append(s)
    parts = 1 if num_plans == 1 else math.ceil(FAMILIES_PER_RANK * num_plans / max(1, len(groups)))
    found = []
    for group in groups.values():
        ordered, count = sorted(group, key=_longest_first), min(parts, len(group))
        found += [ordered[start::count] for start in range(count)]
    return found


def _balance(families: list[list[TrainSequence]], num_plans: int) -> list[list[TrainSequence]]:
    """Longest-processing-time-first; the sequences of each rank, its longest family first."""
    ranks: list[list[TrainSequence]] = [[] for _ in range(num_plans)]
    tokens = [0] * num_plans
    for family in sorted(families, key=lambda family: (-_computed(family), *_longest_first(family[0]))):
        rank = min(range(num_plans), key=lambda r: (tokens[r], r))
        ranks[rank] += family
        tokens[rank] += _computed(family)
    return ranks


def _computed(family: list[TrainSequence]) -> int:
    """Tokens of a family, each prompt counted once; prompts of equal length count as one prompt."""
    return sum({s.lengths.prompt for s in family}) + sum(s.lengths.response for s in family)


def _longest_first(s: TrainSequence) -> tuple[int, int, int]:
    return -s.lengths.total, s.ordinal, s.index


def _runs(sequences: list[TrainSequence], budget: int, *, pads: bool = False) -> list[Microbatch]:
    """Cuts the list into consecutive runs of at most `budget` tokens; with `pads` each sequence of a run counts as its
    longest, and the list is sorted first."""
    runs: list[list[TrainSequence]] = []
    room = 0
    for s in sorted(sequences, key=_longest_first) if pads else sequences:
        if (cost := runs[-1][0].lengths.total if pads and runs else s.lengths.total) > room:
            runs.append([])
            room, cost = budget, s.lengths.total
        runs[-1].append(s)
        room -= cost
    return [tuple(run) for run in runs]


def _filled(sequences: list[TrainSequence], budget: int) -> list[Microbatch]:
    """Micro-batches of at most `budget` tokens by best fit, the longest sequences first; never more than `_runs`."""
    found: list[list[TrainSequence]] = []
    rooms: list[int] = []
    for s in sorted(sequences, key=_longest_first):
        fitting = [i for i, room in enumerate(rooms) if room >= s.lengths.total]
        if not fitting:
            found.append([])
            rooms.append(budget)
            fitting = [len(found) - 1]
        tightest = min(fitting, key=lambda i: rooms[i])
        found[tightest].append(s)
        rooms[tightest] -= s.lengths.total
    # On rare inputs best fit needs more micro-batches than plain cutting.
    return min([tuple(run) for run in found], _runs(sequences, budget), key=len)


def _spread(runs: list[Microbatch], count: int) -> list[Microbatch]:
    """Exactly `count` micro-batches: halves the micro-batch with the most tokens while possible, then appends empty
    ones. Halving saves memory at no cost, since the other ranks run as many."""
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
