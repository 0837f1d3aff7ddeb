from __future__ import annotations

from dataclasses import field

from asyncrl.config.checks import require, require_temperature, section
from asyncrl.ranges import NonNegativeInt, Positive, PositiveInt


@section("eval.")
class EvalConfig:
    every_steps: NonNegativeInt = 0
    """Optimizer steps between held-out evaluations; also before the first step and after the last. 0: none."""
    max_prompts: PositiveInt = 256
    """Number of rows to evaluate from the start of each held-out set."""
    temperature: float = 0.0
    """0 is greedy."""
    samples: PositiveInt = 1
    """Responses to every prompt."""
    pass_at: list[int] = field(default_factory=list)
    """The values of k for which pass@k is reported, each at most samples."""
    leased_replicas: NonNegativeInt = 0
    """Number of replicas that an evaluation leases. They keep the version that it began with, and training continues
    with the others. 0: all replicas evaluate, and training waits."""
    timeout_s: Positive = 1800.0
    """Longest time for the evaluation of one held-out set."""

    def __post_init__(self) -> None:
        require_temperature("eval.temperature", self.temperature)
        require(
            all(1 <= k <= self.samples for k in self.pass_at),
            asked=f"eval.pass_at={self.pass_at} with eval.samples={self.samples}",
            found="pass@k needs at least k responses",
            do="raise eval.samples",
        )
        require(
            self.samples == 1 or self.temperature > 0,
            asked=f"eval.samples={self.samples} with eval.temperature=0",
            found="greedy responses are all alike",
            do="set eval.temperature above 0",
        )
