"""Group-relative advantage: how much better a trajectory did than its siblings, in units of their spread.

    A_i = (r_i - mean(r)) / (std(r) + EPSILON)

It differs from the textbook's r - V(s) in that the group's mean replaces the value function. The paper does not say
which `std` it takes. The default is the population's (divisor G). algorithm.group_std=sample divides by G - 1, as verl,
TRL, AReaL and slime do. That scales every advantage by sqrt((G - 1) / G); Adam hides the factor, but a gradient-norm
bound or a KL term does not. The quotient makes groups count alike whatever their spread: groups that are almost all
right or almost all wrong count more than their rewards say.
Source: DeepSeekMath (arXiv:2402.03300) sec. 4.1.2, outcome supervision.
"""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.group_rewards import centred

EPSILON = 1e-6
"""Keeps the quotient finite; small against any meaningful spread of rewards."""


def grpo_advantages(rewards: np.ndarray, *, sample: bool = False) -> np.ndarray:
    """Advantages of one group, exactly 0 where all rewards are equal.

    Args:
        rewards: [G] float, finite.
        sample: use the sample's spread, with divisor G - 1.

    Returns:
        [G] float64; their sum is 0 up to rounding.

    Raises:
        ValueError: not one-dimensional, empty, or not finite.
    """
    advantages = centred(rewards)
    if not advantages.any():  # the sample's spread of a single reward is not a number
        return advantages
    return advantages / (np.std(rewards, dtype=np.float64, ddof=int(sample)) + EPSILON)
