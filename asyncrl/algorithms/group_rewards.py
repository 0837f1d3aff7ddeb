"""Shared by the group-relative advantages: checks and centres the rewards of one group."""

from __future__ import annotations

import numpy as np


def checked(rewards: np.ndarray) -> np.ndarray:
    """[G] float64. Raises ValueError: not one-dimensional, empty, or not finite."""
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0 or not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, [G] with G >= 1; got {rewards!r}")
    return rewards


def centred(rewards: np.ndarray) -> np.ndarray:
    """[G] float64, minus their mean. Exactly 0 where all are equal: their rounded mean may differ from them.

    Raises ValueError: as `checked`.
    """
    rewards = checked(rewards)
    return np.zeros_like(rewards) if (rewards == rewards[0]).all() else rewards - rewards.mean()


def zero_advantages(rewards: np.ndarray) -> np.ndarray:
    """[G] float64 of zeros, for distillation alone: rewards are measured and not trained on.

    Raises ValueError: as `checked`.
    """
    return np.zeros_like(checked(rewards))
