"""Advantage of maximum-likelihood RL: the reward minus the group's mean, in units of that mean.

    A_i = (r_i - mean(r)) / mean(r), and 0 where mean(r) is 0

With rewards 0 and 1 the mean estimates the chance p of a right response, and 1/p turns the gradient of p into that of
log p. Rarely solved prompts count most, by up to G - 1; GRPO's 1/std treats rare successes and rare failures alike. A
group of G estimates the gradient of the likelihood, expanded in failures up to order G, so more trajectories per prompt
bring the objective itself closer to the likelihood.
Assumes rewards that are never negative. Source: Maximum Likelihood RL (arXiv:2602.02710), with its control variate.
"""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.group_rewards import centred
from asyncrl.errors import ConfigError, explain


def maxrl_advantages(rewards: np.ndarray) -> np.ndarray:
    """[G] float64 from [G] finite rewards of at least 0; exactly 0 where all are equal.

    Raises:
        ConfigError: a reward is negative; dividing by the mean is then meaningless and may flip signs.
        ValueError: malformed rewards.
    """
    advantages = centred(rewards)
    lowest = float(np.min(rewards))
    if lowest < 0:
        found = f"a reward of {lowest:g}: it divides by the group's mean, which stands for a probability"
        do = "use rewards that are never negative (no overlong penalty, no KL in the reward), or another advantage"
        raise ConfigError(explain("algorithm.advantage=maxrl", found, do))
    mean = float(np.mean(rewards, dtype=np.float64))
    return advantages / mean if mean > 0 else advantages
