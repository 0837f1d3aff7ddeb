"""Group-relative advantage: how much better a trajectory did than its siblings, in units of their spread.

    A_i = (r_i - mean(r)) / (std(r) + EPSILON)

It differs from the textbook's advantage r - V(s) in that the group's mean stands in for the value function. The paper
does not say which `std` it takes. By default it is that of the population (divisor G): the group is all that is known.
algorithm.group_std=sample takes the divisor G - 1, as verl, TRL, AReaL and slime do. That makes every advantage
sqrt((G - 1) / G) times as large, which Adam hides, and a bound on the gradient norm or a KL term does not. The quotient
makes groups count alike whatever their spread: those that are almost all right or all wrong count more than by their
rewards.
Source: DeepSeekMath (arXiv:2402.03300) sec. 4.1.2, outcome supervision.
"""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.group_rewards import centred

EPSILON = 1e-6
"""Keeps the quotient finite; small against any spread of rewards that means something."""


def grpo_advantages(rewards: np.ndarray, *, sample: bool = False) -> np.ndarray:
    """Advantages of one group, exactly 0 where all rewards are equal.

    Args:
        rewards: [G] float, finite.
        sample: the spread is that of a sample, with divisor G - 1.

    Returns:
        [G] float64; their sum is 0 up to rounding.

    Raises:
        ValueError: not one-dimensional, empty, or not finite.
    """
    advantages = centred(rewards)
    if not advantages.any():  # 0 / EPSILON is 0 too, but the spread of equal rewards may be rounded to less than that
        return advantages
    return advantages / (np.std(rewards, dtype=np.float64, ddof=int(sample)) + EPSILON)
