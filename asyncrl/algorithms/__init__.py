"""Advantages, losses and corrections, one file each, and the objective that composes them.

Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.algorithms.dr_grpo import dr_grpo_advantages
from asyncrl.algorithms.grpo import grpo_advantages
from asyncrl.algorithms.maxrl import maxrl_advantages
from asyncrl.algorithms.overlong import shaped_rewards
from asyncrl.algorithms.reinforce_plus_plus import baseline_advantages, own_rewards
from asyncrl.algorithms.rloo import rloo_advantages
from asyncrl.registry import resolve

if TYPE_CHECKING:
    from asyncrl.algorithms.objective import Objective
    from asyncrl.config.algorithm import AlgorithmConfig

__all__ = ["ADVANTAGES", "Advantage", "build_advantage", "build_objective", "shaped_rewards"]

Advantage = Callable[[np.ndarray], np.ndarray]
"""Rewards of one group, [G] float -> advantages of its trajectories, [G] float64."""

ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "maxrl": maxrl_advantages,
    "reinforce_plus_plus": own_rewards,
    "reinforce_plus_plus_baseline": baseline_advantages,
    "gae": own_rewards,
}


def build_advantage(name: str, group_std: str = "population") -> Advantage:
    """The advantage called `name`; `group_std` is what `grpo` divides by. Raises ConfigError: there is none."""
    if name == "grpo" and group_std == "sample":
        return partial(grpo_advantages, sample=True)
    return resolve("algorithm.advantage", name, ADVANTAGES)


def build_objective(config: AlgorithmConfig) -> Objective:
    """What `config` composes. Imports torch. Raises ConfigError: a name that is not known."""
    from asyncrl.algorithms import objective_registry as shelf

    return shelf.build_objective(config)
