"""Truncated importance sampling, token by token.

    factor_t = min(exp(m_t), high)        m_t: log of the policy before the update over the behaviour policy

With algorithm.ratio=proximal it completes decoupled PPO: the clip bounds the step, this weight corrects for lag and for
the engine. Truncation trades some bias for a bounded variance. Only with ratio=proximal: see `mismatch.py`.
Source: F. Yao et al., "Your efficient RL framework secretly brings you off-policy training" (2025); as the weight of
decoupled PPO: AReaL (arXiv:2505.24298) eq. 5, there without the bound.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import LossInputs, bounded_ratio, masked
from asyncrl.algorithms.mismatch import Bounded, log_mismatch


class TruncatedIs(Bounded):
    """The `Correction` of this file: weights are at most `high`."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        weight = bounded_ratio(log_mismatch(inputs, "proximal"))
        return masked(weight.clamp(max=self.high), inputs.mask), inputs.mask & (weight > self.high)
