"""Clipped policy-gradient loss on the ratio of whole trajectories.

    s_i     = exp(mean_t (log pi_theta(t) - log pi_old(t)))       over the trained tokens of trajectory i
    s_{i,t} = sg[s_i] pi_theta(t) / sg[pi_theta(t)]               its value is s_i, its gradient that of the token
    loss_t  = - min(s_{i,t} A_t, clip(s_{i,t}, 1 - clip_low, 1 + clip_high) A_t)

Whole trajectories are clipped or kept, because the reward is given for the whole trajectory and single-token ratios are
noisy, above all in a mixture of experts, whose routing changes with every update. The mean over tokens keeps the ratios
of short and long trajectories in one narrow range; bounds are around 1e-4. With algorithm.ratio=behavior, lag and the
mismatch of engine and trainer move s_i by more than that; with ratio=proximal only the updates of one step do.
Summed over a trajectory, the token losses have the gradient of the sequence form (eq. 5) times its trained tokens:
algorithm.aggregation=sequence_mean makes it the paper's.
Source: GSPO (arXiv:2507.18071) eq. 5 to 7, token form eq. 13 and 14.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import Clips, LossInputs, bounded_ratio, masked, masked_log_ratio, sequence_means


class Gspo(Clips):
    """The `Loss` of this file with its bounds: the trajectory's ratio is held in [1 - clip_low, 1 + clip_high]."""

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        own = masked(inputs.logprobs, inputs.mask)
        ratio = bounded_ratio(self._log_ratio(inputs) + own - own.detach())
        advantages = masked(inputs.advantages, inputs.mask)
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """True for the tokens of trajectories where the minimum takes the bound, so the gradient is 0."""
        with torch.no_grad():
            ratio = bounded_ratio(self._log_ratio(inputs))
            advantages = masked(inputs.advantages, inputs.mask)
            above = (advantages > 0) & (ratio > 1 + self.clip_high)
            return above | ((advantages < 0) & (ratio < 1 - self.clip_low))

    @staticmethod
    def _log_ratio(inputs: LossInputs) -> torch.Tensor:
        """[tokens] float32: log s_i of each token's trajectory, without gradient."""
        with torch.no_grad():
            log_ratio = masked_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
            return sequence_means(log_ratio, inputs.mask, inputs.sequences)
