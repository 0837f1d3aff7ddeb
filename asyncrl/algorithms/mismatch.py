"""Distance between the trainer's policy before the update and the policy that sampled; every correction uses it.

    m_t = log pi_before(t) - log pi_behavior(t)

m_t includes the lag of a token and the mismatch of engine and trainer (kernels, precision, expert routing) at lag 0.

    ratio      pi_before                                  corrections
    proximal   `old_logprobs`, denominator of the loss    weight by exp(m_t): the product is the full ratio
    behavior   the policy in training, not yet moved      only drop: the loss divides by pi_behavior already
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from asyncrl.algorithms.loss import LossInputs, bounded_ratio, masked, masked_log_ratio
from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig

if TYPE_CHECKING:
    import torch

Ratio = Literal["behavior", "proximal"]
"""The values of algorithm.ratio."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """The settings of a correction. `low`: 0 for a correction without a lower bound. `ratio`: `algorithm.ratio`."""

    low: float
    high: float
    ratio: Ratio

    @classmethod
    def of(cls, correction: CorrectionConfig, config: AlgorithmConfig) -> Self:
        return cls(*correction.bounds, config.ratio)


def log_mismatch(inputs: LossInputs, ratio: Ratio) -> torch.Tensor:
    """[tokens] float32: m_t, without gradient; 0 outside the mask."""
    before = inputs.logprobs if ratio == "behavior" else inputs.old_logprobs
    return masked_log_ratio(before.detach(), inputs.behavior_logprobs, inputs.mask)


class KeptWithin(Bounded):
    """A `Correction` that keeps tokens with exp(m_t) in [low, high] and, with ratio proximal, weights them."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        weight = bounded_ratio(log_mismatch(inputs, self.ratio))
        kept = inputs.mask & (weight >= self.low) & (weight <= self.high)
        factor = masked(weight, kept) if self.ratio == "proximal" else kept.to(weight.dtype)
        return factor, inputs.mask & ~kept
