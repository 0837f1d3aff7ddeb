"""Masked importance sampling: tokens that the policy makes much likelier than they were sampled are dropped.

    factor_t = exp(m_t) where exp(m_t) <= high, else 0

It differs from truncation in what becomes of a token over the bound: it is left out, where truncation trains it with
too small a weight, on the word of an engine that was wrong about it. With algorithm.ratio=behavior the factor is 1 in
place of exp(m_t): see `mismatch.py`.
Source: J. Liu, Y. Li et al., "When speed kills stability" (2025), token-level MIS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algorithms.loss import LossInputs
from asyncrl.algorithms.mismatch import Ratio, kept_within
from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig


@dataclass(frozen=True, slots=True)
class MaskedIs:
    """The `Correction` of this file. `ratio`: what the loss divides by."""

    high: float
    ratio: Ratio

    @classmethod
    def of(cls, correction: CorrectionConfig, config: AlgorithmConfig) -> MaskedIs:
        return cls(correction.bounds[1], config.ratio)

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        return kept_within(inputs, self.ratio, 0.0, self.high)
