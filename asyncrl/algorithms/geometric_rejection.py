"""Rejection of whole trajectories by the geometric mean of their tokens' ratios.

    factor_i = 1 where low <= exp(mean_t m_t) <= high, else 0      over the trained tokens of trajectory i

Unlike the ratio of the trajectory, the mean does not grow with length, so one narrow pair of bounds, say [0.99, 1.01],
fits short and long trajectories. The factor does not weight tokens: combine it with a token correction or with a loss
over the behaviour policy.
Source: J. Liu, Y. Li et al., "When speed kills stability" (2025), geometric sequence masking.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import LossInputs, bounded_ratio, sequence_means
from asyncrl.algorithms.mismatch import Bounded, log_mismatch


class GeometricRejection(Bounded):
    """The `Correction` of this file."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        log_ratio = log_mismatch(inputs, self.ratio)
        mean = bounded_ratio(sequence_means(log_ratio, inputs.mask, inputs.sequences))
        kept = inputs.mask & (mean >= self.low) & (mean <= self.high)
        return kept.to(log_ratio.dtype), inputs.mask & ~kept
