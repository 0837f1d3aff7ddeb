"""Advantages from the rewards of one group alone: Dr. GRPO (`centred`), leave-one-out, none; and what they share.

REINFORCE++ takes the rewards unchanged (`checked`), or minus the group's mean (`centred`):

    reinforce_plus_plus:           A_t = (R_t - mean(R)) / std(R),  R_t = r - sum_{s >= t} kl_coefficient KL_s
    reinforce_plus_plus_baseline:  A_t = (B_t - mean(B)) / std(B),  B_t = r - mean of the group

Mean and spread are over all trained tokens of the update, so the trainer computes them (`returns.py`): there is no
critic and no division by the spread of a few trajectories. The first needs no group (`batch.group_size=1`); the second
removes the variance from the difficulty of prompts.
Source: REINFORCE++ (arXiv:2501.03262) sec. 3.
"""

from __future__ import annotations

import numpy as np


def checked(rewards: np.ndarray) -> np.ndarray:
    """[G] float64. Raises ValueError: not one-dimensional, empty, or not finite."""
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0 or not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, [G] with G >= 1; got {rewards!r}")
    return rewards


def centred(rewards: np.ndarray) -> np.ndarray:
    """[G] float64, minus their mean: the advantage of Dr. GRPO, A_i = r_i - mean(r). Exactly 0 where all are equal:
    their rounded mean may differ from them.

    It differs from GRPO in that the spread does not divide: with it, questions that are too easy or too hard get more
    weight than the objective gives them. The other half of Dr. GRPO is `algorithm.aggregation=fixed`, by which long
    wrong responses are no longer cheaper per token than short ones.
    Source: Understanding R1-Zero-like training (arXiv:2503.20783) sec. 3.

    Raises ValueError: as `checked`.
    """
    rewards = checked(rewards)
    return np.zeros_like(rewards) if (rewards == rewards[0]).all() else rewards - rewards.mean()


def zero_advantages(rewards: np.ndarray) -> np.ndarray:
    """[G] float64 of zeros, for distillation alone: rewards are measured and not trained on.

    Raises ValueError: as `checked`.
    """
    return np.zeros_like(checked(rewards))


def rloo_advantages(rewards: np.ndarray) -> np.ndarray:
    """[G] float64: the reward against the mean of the other trajectories. Exactly 0 where all are equal, also with G=1.

        A_i = r_i - mean(r_j, j != i) = G / (G - 1) (r_i - mean(r))

    It differs from Dr. GRPO in that a trajectory's own reward is not part of its baseline, so the gradient estimate is
    unbiased for every G; the two agree up to the factor.
    Source: Back to Basics (arXiv:2402.14740), after Kool et al. 2019.

    Raises ValueError: as `checked`.
    """
    advantages = centred(rewards)
    size = len(advantages)
    return advantages * (size / max(1, size - 1))
