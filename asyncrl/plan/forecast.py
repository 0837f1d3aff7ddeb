"""The figures of a simulated run: the rows of the table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.recipe import Recipe
from asyncrl.plan.costs import CostModel
from asyncrl.plan.simulation import SimulatedStep, Simulation

FEWEST_STEPS, MOST_STEPS = 16, 80
"""Bounds of the number of simulated steps."""
SAMPLES = 200_000
"""Simulated trajectories, if FEWEST_STEPS allows."""
WARM_UP_SHARE = 0.25
"""Share of the steps that is left out at the start, while the queue fills."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Means over the steps after the warm-up.

    Attributes:
        step_s: seconds from one optimizer step to the next.
        trainer_idle: share of the time in which the trainer waits for groups.
        replica_idle: share in which replicas decode nothing, mean over replicas.
        lag_mean, lag_max: of the trained tokens, in optimizer steps.
        publish_s: seconds of publish per step; `paused_s`: the part in which it pauses replicas.
        masked: share of the tokens over the limit, which are not trained.
    """

    step_s: float
    samples_per_s: float
    trainer_idle: float
    replica_idle: float
    lag_mean: float
    lag_max: int
    publish_s: float
    paused_s: float
    masked: float = 0.0

    @classmethod
    def of(cls, steps: Sequence[SimulatedStep], recipe: Recipe) -> Forecast:
        """From the steps of a simulation, at least two."""
        first = max(1, int(WARM_UP_SHARE * len(steps)))
        begun, late = steps[first - 1], steps[first:]
        seconds = late[-1].ended - begun.ended
        tokens = sum(step.tokens for step in late)
        masked = sum(step.masked for step in late)
        return cls(
            step_s=seconds / len(late),
            samples_per_s=recipe.batch.num_trajectories * len(late) / seconds,
            trainer_idle=sum(step.waited_s for step in late) / seconds,
            replica_idle=max(0.0, 1.0 - (late[-1].busy_s - begun.busy_s) / seconds / recipe.rollout.num_replicas),
            lag_mean=sum(step.lag_sum for step in late) / tokens if tokens else 0.0,
            lag_max=max(step.lag_max for step in late),
            publish_s=sum(step.publish_s for step in late) / len(late),
            paused_s=sum(step.paused_s for step in late) / len(late),
            masked=masked / (tokens + masked) if masked else 0.0,
        )


def num_steps(recipe: Recipe) -> int:
    """Number of simulated steps: enough to leave the start behind, few enough to take seconds."""
    needed = max(FEWEST_STEPS, 4 * (recipe.max_lag + recipe.staleness.publish_every_steps))
    return max(needed, min(MOST_STEPS, SAMPLES // recipe.batch.num_trajectories))


def predict(recipe: Recipe, costs: CostModel, steps: int | None = None) -> Forecast:
    """`steps`: to simulate; None: `num_steps`."""
    return Forecast.of(Simulation(recipe, costs).run(steps or num_steps(recipe)), recipe)


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration. `settings`: the keys that differ from the recipe, and their values."""

    settings: Mapping[str, str]
    forecast: Forecast
