"""Group-relative advantage: how much better a trajectory did than its siblings, in units of their spread.

    A_i = (r_i - mean(r)) / (std(r) + EPSILON)

It differs from the textbook's advantage r - V(s) in that the group's mean stands in for the value function. `std` is
that of the population (divisor G): the group is all that is known, not a sample to correct for.
Source: DeepSeekMath (arXiv:2402.03300) sec. 4.1.2, outcome supervision.
"""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6
"""Keeps the quotient finite; small against any spread of rewards that means something."""


def grpo_advantages(rewards: np.ndarray) -> np.ndarray:
    """Advantages of one group, exactly 0 where all rewards are equal.

    Args:
        rewards: [G] float, finite.

    Returns:
        [G] float64; their sum is 0 up to rounding.

    Raises:
        ValueError: not one-dimensional, empty, or not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0 or not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, [G] with G >= 1; got {rewards!r}")
    if (rewards == rewards[0]).all():  # the rounded mean may differ from the rewards: 0 / EPSILON would be noise
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + EPSILON)
