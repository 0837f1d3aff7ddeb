"""Policy gradient with clipped importance weights: every token keeps a gradient.

    loss_t = - sg[clip(ratio_t, 1 - clip_low, 1 + clip_high)] A_t log pi_theta(t)

It differs from the clipped surrogate in that the bound limits the weight of a token, not its gradient. Rare tokens that
turn a line of reasoning ("however", "wait") move far at the first update; PPO's clip would exclude them from all later
ones. Assumes that bounded weights are enough of a trust region. The paper sets no lower bound (algorithm.clip_low=1)
and tunes the upper one.
Source: MiniMax-M1 (arXiv:2506.13585) eq. 4 and 5.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import Clips, LossInputs, bounded_ratio, masked, masked_log_ratio


class Cispo(Clips):
    """The `Loss` of this file: weights are held in [1 - clip_low, 1 + clip_high]."""

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        weight = self._ratio(inputs).clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * masked(inputs.advantages, inputs.mask) * masked(inputs.logprobs, inputs.mask)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """True where the weight is at a bound, so the gradient is smaller or larger than the ratio would make it."""
        ratio = self._ratio(inputs)
        return inputs.mask & ((ratio > 1 + self.clip_high) | (ratio < 1 - self.clip_low))

    @staticmethod
    def _ratio(inputs: LossInputs) -> torch.Tensor:
        with torch.no_grad():
            return bounded_ratio(masked_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask))
