"""The settings of a recipe that decide when things happen. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import require
from asyncrl.config.recipe import Interrupt, Recipe
from asyncrl.config.threads import trainer_threads
from asyncrl.queue.pacing import PacingName
from asyncrl.queue.staleness import OnOverdue


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A recipe, reduced to the simulation's input.

    Attributes:
        empties_queue: a publish waits until no group is being generated or can be admitted.
        overlaps_publish: a publish runs during the next step, unless it empties the queue.
        decodes_at_once: requests that one replica decodes together.
        num_threads: of each trainer rank; None: nobody shares cores.
        rolling_replicas: replicas per wave of a publish; None: all.
        response_limit: tokens of the longest response.
    """

    groups_per_step: int
    group_size: int
    max_lag: int
    publish_every_steps: int = 1
    empties_queue: bool = False
    overlaps_publish: bool = False
    interrupt: Interrupt = "abort_resume"
    on_overdue: OnOverdue = "wait"
    pacing: PacingName = "eager"
    num_replicas: int = 1
    decodes_at_once: int = 256
    num_ranks: int = 1
    num_threads: int | None = None
    num_epochs: int = 1
    rolling_replicas: int | None = None
    response_limit: float = float("inf")
    dynamic_sampling: bool = False
    filtered_window: int = 256
    max_attempts: int = 3
    seed: int = 0

    @classmethod
    def of(cls, recipe: Recipe, cores: float | None = None) -> Scenario:
        """
        Args:
            cores: shared by ranks and replicas; None: each has its own.

        Raises ConfigError if the simulation does not model how the recipe's parts take turns.
        """
        require(
            not recipe.is_colocated or recipe.mode == "sync",
            asked=f"a forecast of placement=colocated in mode {recipe.mode}",
            found="the simulated replicas generate while the trainer trains; only mode sync takes turns there",
            do="set mode=sync or placement=separate for the forecast",
        )
        return cls(
            groups_per_step=recipe.batch.groups_per_step,
            group_size=recipe.batch.group_size,
            max_lag=recipe.max_lag,
            publish_every_steps=recipe.staleness.publish_every_steps,
            empties_queue=recipe.empties_queue,
            overlaps_publish=recipe.overlaps_publish,
            interrupt=recipe.interrupt,
            on_overdue=recipe.staleness.on_overdue,
            pacing=recipe.pacing,
            num_replicas=recipe.rollout.num_replicas,
            decodes_at_once=recipe.rollout.settings.decodes_at_once,
            num_ranks=recipe.trainer.num_ranks,
            num_threads=None if cores is None else trainer_threads(recipe, cores=max(1, round(cores))),
            num_epochs=recipe.batch.num_epochs,
            rolling_replicas=recipe.weights.rolling_replicas if recipe.rolls_publish else None,
            response_limit=recipe.longest_response_tokens,
            dynamic_sampling=recipe.algorithm.dynamic_sampling,
            filtered_window=recipe.algorithm.filtered_window,
            max_attempts=recipe.rollout.max_attempts,
            seed=recipe.run.seed,
        )

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.group_size
