"""Advantages, losses and corrections, one file each, and the objective that composes them.

Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.algorithms.grpo import grpo_advantages
from asyncrl.registry import resolve

if TYPE_CHECKING:
    from asyncrl.algorithms.loss import Correction, Loss
    from asyncrl.algorithms.objective import Objective
    from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig

Advantage = Callable[[np.ndarray], np.ndarray]
"""Rewards of one group, [G] float -> advantages of its trajectories, [G] float64."""


def own_rewards(rewards: np.ndarray) -> np.ndarray:
    """[G] float64: the rewards themselves, where the trainer makes advantages token by token."""
    return np.asarray(rewards, np.float64)


def _clipped_surrogate(config: AlgorithmConfig) -> Loss:
    from asyncrl.algorithms.clipped_surrogate import ClippedSurrogate

    return ClippedSurrogate(clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip)


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo_advantages,
    "reinforce_plus_plus": own_rewards,
    "gae": own_rewards,
}
LOSSES: dict[str, Callable[[AlgorithmConfig], Loss]] = {"clipped_surrogate": _clipped_surrogate}
CORRECTIONS: dict[str, Callable[[CorrectionConfig], Correction]] = {}


def build_advantage(name: str) -> Advantage:
    """The advantage called `name`. Raises ConfigError: there is none."""
    return resolve("algorithm.advantage", name, ADVANTAGES)


def build_objective(config: AlgorithmConfig) -> Objective:
    """What `config` composes. Imports torch. Raises ConfigError: a name that is not known."""
    from asyncrl.algorithms.objective import Objective

    loss = resolve("algorithm.loss", config.loss, LOSSES)(config)
    corrections = tuple((c.name, resolve("algorithm.corrections", c.name, CORRECTIONS)(c)) for c in config.corrections)
    return Objective(loss, corrections, config)


def shaped_rewards(rewards: Sequence[float], response_tokens: Sequence[int], config: AlgorithmConfig) -> np.ndarray:
    """[G] float64: rewards with the soft penalty for long responses taken off. Lengths in tokens."""
    raise NotImplementedError
