"""Importance weights divided by their mean over the update: self-normalised importance sampling.

    factor_t = c_t / mean(c)        c_t: the weight that a correction gives, after its bound

The mean is over all trained tokens of the update, on all ranks, tokens of weight 0 included. Trajectory weights
(sequence_truncated_is) are averaged over the trajectories that have a trained token. Unlike plain weights, normalised
weights keep the step size independent of lag: neither truncation nor samples far from the policy shrink the update. The
price is a bias of order 1 / tokens, and a forward pass before the update, since the mean must be known before the first
gradient.
Source: `rollout_is_batch_normalize` of verl; self-normalised estimators: Owen, Monte Carlo theory (2013) ch. 9.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrl.algorithms.loss import AddUp, Correction, LossInputs, sequence_sums


@dataclass(frozen=True, slots=True)
class BatchNormalized:
    """The `FittedCorrection` of this file: `inner`, called `name`, with weights of mean 1. `per_trajectory`: all tokens
    of a trajectory share one weight, which counts once."""

    name: str
    inner: Correction
    per_trajectory: bool

    def fit(self, microbatches: Sequence[LossInputs], add_up: AddUp) -> torch.Tensor:
        """[] float32: mean of the weights; 1 where all are 0. Collective."""
        sums = [self._sums(inputs) for inputs in microbatches]
        total, count = add_up(torch.stack(sums).sum(0))
        return torch.where(total > 0, total / count.clamp(min=1), 1.0).float()

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        weights, touched = self.inner(inputs)
        return weights / inputs.fitted[self.name].to(weights.dtype), touched

    def _sums(self, inputs: LossInputs) -> torch.Tensor:
        """[2] float64: sum and number of the weights."""
        weights = self.inner(inputs)[0].double()
        shares = inputs.mask.double()
        # Equal shares of its tokens make a trajectory count once.
        if self.per_trajectory:
            shares = shares / sequence_sums(shares, inputs.mask, inputs.sequences).clamp(min=1)
        return torch.stack([(weights * shares).sum(), shares.sum()])
