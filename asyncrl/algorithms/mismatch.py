"""The distance of the trainer's policy before the update from the policy that sampled; every correction uses it.

    m_t = log pi_before(t) - log pi_behavior(t)

It holds both the lag of a token and the mismatch of engine and trainer (kernels, precision, routing of experts) at lag
0. Where algorithm.ratio=proximal, pi_before is `old_logprobs`, and a loss over pi_theta / pi_before leaves m_t to the
corrections: those that keep a token also weigh it by exp(m_t), which makes the product the full importance ratio.
Where ratio=behavior, the loss divides by pi_behavior itself and `old_logprobs` say nothing new: pi_before is then the
policy in training, which has not moved in this update yet; corrections only drop tokens, since weighing would count
m_t twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from asyncrl.algorithms.loss import LossInputs, bounded_ratio, masked, masked_log_ratio

if TYPE_CHECKING:
    import torch

Ratio = Literal["behavior", "proximal"]
"""The values of algorithm.ratio."""


def log_mismatch(inputs: LossInputs, ratio: Ratio) -> torch.Tensor:
    """[tokens] float32: m_t, without gradient; 0 outside the mask."""
    before = inputs.logprobs if ratio == "behavior" else inputs.old_logprobs
    return masked_log_ratio(before.detach(), inputs.behavior_logprobs, inputs.mask)


def kept_within(inputs: LossInputs, ratio: Ratio, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What a `Correction` gives that keeps tokens with exp(m_t) in [low, high], and weighs them where that is due."""
    weight = bounded_ratio(log_mismatch(inputs, ratio))
    kept = inputs.mask & (weight >= low) & (weight <= high)
    factor = masked(weight, kept) if ratio == "proximal" else kept.to(weight.dtype)
    return factor, inputs.mask & ~kept
