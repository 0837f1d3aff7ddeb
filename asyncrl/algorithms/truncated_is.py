"""Truncated importance sampling, token by token or with one weight per trajectory.

    factor_t = min(exp(m_t), high)        m_t: log of the policy before the update over the behaviour policy

With algorithm.ratio=proximal it completes decoupled PPO: the clip bounds the step, this weight corrects for lag and for
the engine. Truncation trades some bias for a bounded variance. Only with ratio=proximal: see `mismatch.py`.
Source: F. Yao et al., "Your efficient RL framework secretly brings you off-policy training" (2025); as the weight of
decoupled PPO: AReaL (arXiv:2505.24298) eq. 5, there without the bound; truncation: arXiv:1802.01561.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import LossInputs, bounded_ratio, masked, sequence_sums
from asyncrl.algorithms.mismatch import Bounded, log_mismatch


class TruncatedIs(Bounded):
    """Each token has a weight of its own, of at most `high`."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        weight = bounded_ratio(log_mismatch(inputs, "proximal"))
        return masked(weight.clamp(max=self.high), inputs.mask), inputs.mask & (weight > self.high)


class SequenceTruncatedIs(Bounded):
    """One weight per trajectory, of at most `high`.

        factor_i = min(exp(sum_t m_t), high)      over the trained tokens of trajectory i

    The factor is the importance weight of the trajectory, so it is unbiased below the bound; a token's own ratio
    corrects for the token but not for the text before it. The price is variance: the sum grows with length, so unless
    the mismatch is small, long trajectories are at the bound or near 0.

    Source: J. Liu, Y. Li et al., "When speed kills stability" (2025), sequence-level TIS.
    """

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        whole = sequence_sums(log_mismatch(inputs, "proximal"), inputs.mask, inputs.sequences)
        weight = bounded_ratio(whole)
        return masked(weight.clamp(max=self.high), inputs.mask), inputs.mask & (weight > self.high)
