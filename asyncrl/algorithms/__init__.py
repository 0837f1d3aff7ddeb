"""Advantages, losses and corrections, one file each, and the objective that composes them.

Runs in: driver (advantages), trainer rank (losses).

`config/algorithm_parts.py` lists them. Importing this package imports neither them nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.config.algorithm_parts import ADVANTAGES, CORRECTIONS, LOSSES
from asyncrl.registry import resolve

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.loss import Correction, Loss
    from asyncrl.algorithms.objective import Objective
    from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig, GaeConfig

Advantage = Callable[[np.ndarray], np.ndarray]
"""Rewards of one group, [G] float -> advantages of its trajectories, [G] float64."""
TokenAdvantage = Callable[
    ["torch.Tensor", "torch.Tensor | None", "torch.Tensor", "GaeConfig"], "tuple[torch.Tensor, torch.Tensor | None]"
]
"""(rewards, values, sequences, config) of the trained tokens of one micro-batch, [n] each -> (advantages, returns).

rewards: `returns.token_rewards`. values: of the critic, None without one. sequences: ascending numbers of the
trajectories. returns: targets of the critic, None without one. Results have no gradient and are not whitened yet."""


def build_advantage(name: str, group_std: str = "population") -> Advantage:
    """The advantage called `name`; for `group_std` see `AlgorithmConfig`. Raises ConfigError: unknown name."""
    spec = resolve("algorithm.advantage", name, ADVANTAGES)
    made = resolve_name(spec.of_group)
    return partial(made, sample=True) if spec.has_group_std and group_std == "sample" else made


def build_token_advantage(name: str) -> TokenAdvantage | None:
    """The per-token function of this advantage. None: every token has the advantage of its trajectory."""
    path = ADVANTAGES[name].of_tokens
    return None if path is None else resolve_name(path)


def build_objective(config: AlgorithmConfig) -> Objective:
    """The objective that `config` describes. Imports torch. Raises ConfigError: unknown name."""
    from asyncrl.algorithms.objective import Objective

    return Objective(
        build_loss(config), tuple((c.name, build_correction(c, config)) for c in config.corrections), config
    )


def build_loss(config: AlgorithmConfig) -> Loss:
    """Imports torch. Raises ConfigError: unknown name."""
    spec = resolve("algorithm.loss", config.loss, LOSSES)
    return resolve_name(spec.of).of(config)


def build_correction(correction: CorrectionConfig, config: AlgorithmConfig) -> Correction:
    """Imports torch. Raises ConfigError: unknown name."""
    from asyncrl.algorithms.batch_normalized import BatchNormalized

    spec = resolve("algorithm.corrections", correction.name, CORRECTIONS)
    built = resolve_name(spec.of).of(correction, config)
    if not correction.normalize:
        return built
    return BatchNormalized(correction.name, built, per_trajectory=spec.scope == "trajectory")
