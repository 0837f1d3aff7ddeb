"""Plans one step: from the rewards of a lease to the plan of each data-parallel index. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from asyncrl.algorithms import build_advantage
from asyncrl.algorithms.overlong import shaped_rewards
from asyncrl.config.algorithm_parts import ADVANTAGES
from asyncrl.config.recipe import Recipe
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.types import GroupSummary, LeaseManifest, RankPlan, TrajectoryKey


class StepPlanner:
    """rewards - length penalty - divergence from the reference -> advantages -> micro-batches."""

    def __init__(self, recipe: Recipe) -> None:
        self._algorithm = algorithm = recipe.algorithm
        self._advantage = build_advantage(algorithm.advantage, algorithm.group_std)
        self._rules = PackingRules.of(recipe)
        self._longest_response_tokens = recipe.longest_response_tokens
        kl, self._scope = algorithm.kl, ADVANTAGES[algorithm.advantage].scope
        self.needs_kl = kl.coefficient > 0 and kl.place == "reward" and self._scope == "group"
        """True when `plan` needs the divergence of each trajectory."""

    def plan(
        self,
        manifest: LeaseManifest,
        divergence: Mapping[TrajectoryKey, float] | None = None,
        *,
        correction_bounds: float = 1.0,
    ) -> tuple[RankPlan, ...]:
        """One plan per data-parallel index. The packing depends on the manifest alone.

        Args:
            divergence: of each sequence from the reference model, summed over its trained tokens, nats.
            correction_bounds: see `RankPlan`.
        """
        plans = plan_step(manifest, [self._advantages(group, divergence) for group in manifest.groups], self._rules)
        return tuple(replace(plan, correction_bounds=correction_bounds) for plan in plans)

    def _advantages(self, group: GroupSummary, divergence: Mapping[TrajectoryKey, float] | None) -> np.ndarray:
        """Raises ConfigError: the group has branches (possible after a resume), and advantages are per token."""
        if self._scope != "group" and len(group.lengths) != len(group.rewards):
            asked = f"algorithm.advantage={self._algorithm.advantage} for group {group.ordinal}"
            found = "the checkpoint was made with rollout.agent.train=all_branches, and the group has branches"
            raise ConfigError(explain(asked, found, "resume with the advantage that the checkpoint was made with"))
        lengths = [n.response for n in group.lengths[: len(group.rewards)]]  # of a trajectory, without its branches
        rewards = shaped_rewards(group.rewards, lengths, self._algorithm.overlong, self._longest_response_tokens)
        if divergence is not None:
            # The divergence of all branches counts for their trajectory.
            nats = np.zeros(len(rewards))
            np.add.at(nats, list(group.owners), [divergence[group.ordinal, i] for i in range(len(group.lengths))])
            rewards = rewards - self._algorithm.kl.coefficient * nats
        return self._advantage(rewards)
