"""Advantage 0 for every trajectory: rewards are measured but not trained on. For on-policy distillation, which adds its
own advantage to each token (`distillation.py`)."""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.group_rewards import checked


def zero_advantages(rewards: np.ndarray) -> np.ndarray:
    """[G] float64 of zeros. Raises ValueError: malformed rewards."""
    return np.zeros_like(checked(rewards))
