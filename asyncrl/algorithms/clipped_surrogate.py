"""Clipped policy-gradient loss on the ratio of the trained policy to the behaviour policy.

    ratio_t = exp(log pi_theta(t) - log mu(t))
    loss    = - sum_t min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)

It differs from PPO in two ways. The bounds are asymmetric, so that unlikely tokens may grow faster than likely ones
shrink. And mu is what the replica reported at sampling time, per token, possibly by several policy versions, where PPO
evaluates the policy of the last update again: no extra forward pass, and the ratio corrects for the lag as well.
Assumes that the lag is small (`staleness.max_lag`): clipping bounds the update, not the bias of old data.
Source: PPO (arXiv:1707.06347) eq. 7; asymmetric bounds and token-level sum: DAPO (arXiv:2503.14476) sec. 3.1, 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algorithms.loss import LossInputs, LossStatistics


def clipped_surrogate(
    logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Per-token clipped policy-gradient loss, summed and not normalised.

    Args:
        logprobs: [tokens] float32, log pi_theta of the sampled token.
        behavior_logprobs: [tokens] float32, as the replica reported at sampling time.
        advantages: [tokens] float32.
        mask: [tokens] bool, True where the policy generated the token. The rest may hold anything, NaN included.
        clip_low, clip_high: the ratio is held in [1 - clip_low, 1 + clip_high].

    Returns:
        Scalar float32. Divide by the global number of True mask entries.

    Raises:
        ValueError: lengths differ.

    Source: PPO (arXiv:1707.06347) eq. 7; asymmetric bounds from DAPO (arXiv:2503.14476) sec. 3.1.
    """
    if not logprobs.shape == behavior_logprobs.shape == advantages.shape == mask.shape:
        shapes = [tuple(t.shape) for t in (logprobs, behavior_logprobs, advantages, mask)]
        raise ValueError(f"logprobs, behavior_logprobs, advantages and mask differ in shape: {shapes}")
    ratio = _masked_log_ratio(logprobs, behavior_logprobs, mask).exp()
    advantages = _masked(advantages, mask)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def surrogate_statistics(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossStatistics:
    """A token counts as clipped where the bound is what the minimum takes, that is where its gradient is cut to 0."""
    with torch.no_grad():
        log_ratio = _masked_log_ratio(inputs.logprobs, inputs.behavior_logprobs, inputs.mask)
        ratio = _masked(log_ratio.exp(), inputs.mask)
        advantages = _masked(inputs.advantages, inputs.mask)
        clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
        largest = ratio.max() if ratio.numel() else ratio.new_zeros(())
        return LossStatistics(clipped=clipped.sum(), ratio=ratio.sum(), kl=-log_ratio.sum(), ratio_max=largest)


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """The `Loss` of this file with its bounds."""

    clip_low: float
    clip_high: float

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        return clipped_surrogate(
            inputs.logprobs,
            inputs.behavior_logprobs,
            inputs.advantages,
            inputs.mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )

    def statistics(self, inputs: LossInputs) -> LossStatistics:
        return surrogate_statistics(inputs, clip_low=self.clip_low, clip_high=self.clip_high)


def _masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with 0 outside the mask: a product with the mask would keep NaN, also in the gradient."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _masked_log_ratio(logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _masked(logprobs, mask) - _masked(behavior_logprobs, mask)
