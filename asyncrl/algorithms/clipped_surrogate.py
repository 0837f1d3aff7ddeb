"""Clipped policy-gradient loss on the ratio of the trained policy to the old one.

    ratio_t = exp(log pi_theta(t) - log pi_old(t))
    loss_t  = - min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)
    with dual_clip c > 1 and A_t < 0:  loss_t = min(loss_t, - c A_t)

It differs from PPO in two ways. The bounds are asymmetric: unlikely tokens may grow faster than likely ones shrink.
With `algorithm.ratio=behavior`, pi_old is the log-probability that the replica reported at sampling time, possibly
under several policy versions, whereas PPO re-evaluates the policy of the last update. This saves a forward pass, and
the ratio corrects for lag as well. Assumes a small lag (`staleness.max_lag`): clipping bounds the update, not the bias
of old data.
Source: PPO (arXiv:1707.06347) eq. 7; asymmetric bounds: DAPO (arXiv:2503.14476) sec. 3.1; dual clip: arXiv:1912.09729
eq. 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algorithms.loss import LossInputs, bounded_ratio, masked, masked_log_ratio, require_same_shape
from asyncrl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """The `Loss` of this file: the ratio is held in [1 - clip_low, 1 + clip_high]. `dual_clip`: upper bound of the loss
    at negative advantage, as a multiple of |advantage|; 0: no such bound."""

    clip_low: float
    clip_high: float
    dual_clip: float = 0.0

    @classmethod
    def of(cls, config: AlgorithmConfig) -> ClippedSurrogate:
        return cls(config.clip_low, config.clip_high, config.dual_clip)

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """Raises ValueError: lengths differ."""
        logprobs, old_logprobs, mask = inputs.logprobs, inputs.old_logprobs, inputs.mask
        require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=inputs.advantages, mask=mask)
        ratio = bounded_ratio(masked_log_ratio(logprobs, old_logprobs, mask))
        advantages = masked(inputs.advantages, mask)
        loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
        if self.dual_clip:
            loss = torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)
        return loss

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """True where the minimum takes the bound, so the gradient is 0."""
        with torch.no_grad():
            ratio = bounded_ratio(masked_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask))
            advantages = masked(inputs.advantages, inputs.mask)
            far = self.dual_clip or float("inf")
            above = (advantages > 0) & (ratio > 1 + self.clip_high)
            return above | ((advantages < 0) & ((ratio < 1 - self.clip_low) | (ratio > far)))
