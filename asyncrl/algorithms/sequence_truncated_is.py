"""Truncated importance sampling with one weight per trajectory.

    factor_i = min(exp(sum_t m_t), high)      over the trained tokens of trajectory i

The factor is the importance weight of the trajectory, so it is unbiased below the bound; a token's own ratio corrects
for the token but not for the text before it. The price is variance: the sum grows with length, so unless the mismatch
is small, long trajectories are at the bound or near 0. Only with algorithm.ratio=proximal: see `mismatch.py`.
Source: J. Liu, Y. Li et al., "When speed kills stability" (2025), sequence-level TIS; truncation: arXiv:1802.01561.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import LossInputs, bounded_ratio, masked, sequence_sums
from asyncrl.algorithms.mismatch import Bounded, log_mismatch


class SequenceTruncatedIs(Bounded):
    """The `Correction` of this file: weights are at most `high`."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        whole = sequence_sums(log_mismatch(inputs, "proximal"), inputs.mask, inputs.sequences)
        weight = bounded_ratio(whole)
        return masked(weight.clamp(max=self.high), inputs.mask), inputs.mask & (weight > self.high)
