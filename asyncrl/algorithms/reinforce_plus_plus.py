"""Group advantages for REINFORCE++: the rewards unchanged, or minus the group's mean.

    reinforce_plus_plus:           A_t = (R_t - mean(R)) / std(R),  R_t = r - sum_{s >= t} kl_coefficient KL_s
    reinforce_plus_plus_baseline:  A_t = (B_t - mean(B)) / std(B),  B_t = r - mean of the group

Mean and spread are over all trained tokens of the update, so the trainer computes them (`returns.py`): there is no
critic and no division by the spread of a few trajectories. The first needs no group (`batch.group_size=1`); the second
removes the variance from the difficulty of prompts.
Source: REINFORCE++ (arXiv:2501.03262) sec. 3.
"""

from __future__ import annotations

from asyncrl.algorithms.group_rewards import centred, checked

own_rewards = checked
"""The rewards themselves; the trainer turns them into token advantages."""
baseline_advantages = centred
"""Not yet whitened."""
