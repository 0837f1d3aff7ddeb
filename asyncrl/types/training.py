"""The plan of one step for the trainer ranks, the metrics of the step, and the result of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.types.groups import Lengths
from asyncrl.types.metrics import Metric


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """A trajectory, or a branch of one, as a trainer rank consumes it: where to fetch it, the trajectory's advantage
    (its reward, where advantages are made token by token) and `token_weight`, the share of the update's objective that
    each of its trained tokens has.

    `index` is its place in `TrajectoryGroup.sequences`, `owner` that of its trajectory.
    """

    ordinal: int
    index: int
    advantage: float
    lengths: Lengths
    owner: int
    token_weight: float = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainSequence, (self.ordinal, self.index, self.advantage, self.lengths, self.owner, self.token_weight)


Microbatch = tuple[TrainSequence, ...]
TrajectoryKey = tuple[int, int]
"""(ordinal, index in `TrajectoryGroup.sequences`)."""


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """The work of the ranks of one data-parallel index in one step: their micro-batches, update by update.

    Every plan has the same number of updates, and of micro-batches in each. `silent`: for each update, how many of its
    first micro-batches have gradient 0 on every rank and need no backward pass; empty: none.
    `correction_bounds`: 1, or a share that brings the bounds of the corrections closer (`AlgorithmConfig.closer`).
    """

    step: int
    updates: tuple[tuple[Microbatch, ...], ...]
    correction_bounds: float = 1.0
    silent: tuple[int, ...] = ()

    @property
    def microbatches(self) -> tuple[Microbatch, ...]:
        """Of all updates, in order."""
        return tuple(microbatch for update in self.updates for microbatch in update)

    @property
    def keys(self) -> tuple[TrajectoryKey, ...]:
        """Keys of its sequences, unique and ascending: the ranks fetch these."""
        return tuple(self.lengths)

    @property
    def lengths(self) -> dict[TrajectoryKey, Lengths]:
        """Of its sequences, by their keys, ascending."""
        found = {(s.ordinal, s.index): s.lengths for microbatch in self.microbatches for s in microbatch}
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class TrainMetrics:
    """Metrics of one step over all ranks: means over its updates, except the global counts `trained_tokens` and
    `packed_tokens` (prompts included) and `ratio_max`, the largest ratio of a trained token.

    `skipped_updates`: updates without a trained token on any rank, which changed nothing.

    `loss` is the objective; `means` are means over the trained tokens, by `Metric`: of the objective, of the
    algorithm's parts, and of the tokens per lag.
    """

    loss: float
    grad_norm: float
    lr: float
    ratio_max: float
    trained_tokens: int
    packed_tokens: int
    means: tuple[tuple[str, float], ...]
    skipped_updates: int = 0

    def mean(self, name: str) -> float:
        return dict(self.means)[name]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of one held-out set. `accuracy` is the share of right responses, over `num_prompts` prompts with
    `samples` responses each (mean@samples); `interval` is its 95% interval; `pass_at` are pairs (k, pass@k), means over
    the prompts.

    `reward_mean` and `response_tokens_mean` are over completed responses; a response whose environment or reward raised
    counts as wrong and in `num_failed`. `pass_rates`: share of right responses per prompt. `versions`: policy versions
    of the tokens, ascending; more than one only if every replica was lost midway. `num_questions`: distinct prompts,
    the sample size of `interval`. `num_asked`: prompts of the set, of which `num_prompts` were answered before the
    deadline; 0: all. `shown`: (prompt, response, reward) of the first few.
    """

    name: str
    accuracy: float
    reward_mean: float
    response_tokens_mean: float
    num_prompts: int
    num_failed: int
    samples: int = 1
    interval: tuple[float, float] = (0.0, 1.0)
    pass_at: tuple[tuple[int, float], ...] = ()
    pass_rates: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    num_questions: int = 0
    num_asked: int = 0
    shown: tuple[tuple[str, str, float], ...] = ()

    def metrics(self) -> dict[str, float]:
        """The metrics of this set, by the names of `metrics.jsonl`."""
        found = {Metric.EVAL_ACCURACY_OF.of(self.name): self.accuracy}
        if self.samples > 1:
            found[Metric.EVAL_MEAN.of(f"{self.samples}/{self.name}")] = self.accuracy
        return found | {Metric.EVAL_PASS.of(f"{k}/{self.name}"): value for k, value in self.pass_at}
