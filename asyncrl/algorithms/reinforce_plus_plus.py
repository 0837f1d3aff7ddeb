"""Group advantages for REINFORCE++: the rewards unchanged, or minus the group's mean.

    reinforce_plus_plus:           A_t = (R_t - mean(R)) / std(R),  R_t = r - sum_{s >= t} kl_coefficient KL_s
    reinforce_plus_plus_baseline:  A_t = (B_t - mean(B)) / std(B),  B_t = r - mean of the group

Mean and spread are over all trained tokens of the update, so the trainer computes them (`returns.py`): there is no
critic and no division by the spread of a few trajectories. The first needs no group (`batch.group_size=1`); the second
removes the variance from the difficulty of prompts.
Source: REINFORCE++ (arXiv:2501.03262) sec. 3.
"""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.group_rewards import centred, checked


def own_rewards(rewards: np.ndarray) -> np.ndarray:
    """[G] float64: the rewards themselves; the trainer turns them into token advantages. Raises ValueError: malformed
    rewards."""
    return checked(rewards)


def baseline_advantages(rewards: np.ndarray) -> np.ndarray:
    """[G] float64, exactly 0 where all rewards are equal; not yet whitened. Raises ValueError: malformed rewards."""
    return centred(rewards)
