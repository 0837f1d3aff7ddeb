"""Leave-one-out advantage: the reward against the mean of the other trajectories of the group.

    A_i = r_i - mean(r_j, j != i) = G / (G - 1) (r_i - mean(r))

It differs from Dr. GRPO in that a trajectory's own reward is not part of its baseline, so the gradient estimate is
unbiased for every G; the two agree up to the factor.
Source: Back to Basics (arXiv:2402.14740), after Kool et al. 2019.
"""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.group_rewards import centred


def rloo_advantages(rewards: np.ndarray) -> np.ndarray:
    """[G] float64 from [G] finite rewards, exactly 0 where all are equal, also with G = 1. Raises ValueError: malformed
    rewards."""
    advantages = centred(rewards)
    size = len(advantages)
    return advantages * (size / max(1, size - 1))
