"""Advantages and losses, one file each. Importing this package does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.algorithms.grpo import grpo_advantages
from asyncrl.registry import resolve

if TYPE_CHECKING:
    from asyncrl.algorithms.loss import Loss
    from asyncrl.config.algorithm import AlgorithmConfig

Advantage = Callable[[np.ndarray], np.ndarray]
"""Rewards of one group, [G] float -> advantages of its trajectories, [G] float64."""


def _clipped_surrogate(config: AlgorithmConfig) -> Loss:
    from asyncrl.algorithms.clipped_surrogate import ClippedSurrogate

    return ClippedSurrogate(clip_low=config.clip_low, clip_high=config.clip_high)


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo_advantages}
LOSSES: dict[str, Callable[[AlgorithmConfig], Loss]] = {"clipped_surrogate": _clipped_surrogate}


def build_advantage(name: str) -> Advantage:
    """The advantage called `name`. Raises ConfigError: there is none."""
    return resolve("algorithm.advantage", name, ADVANTAGES)


def build_loss(config: AlgorithmConfig) -> Loss:
    """The loss that `config` chooses, with its settings. Imports torch. Raises ConfigError: there is none."""
    return resolve("algorithm.loss", config.loss, LOSSES)(config)
