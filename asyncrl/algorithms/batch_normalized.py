"""Importance weights divided by their mean over the update: self-normalised importance sampling.

    factor_t = c_t / mean(c)        c_t: the weight that a correction gives, after its bound

The mean is over all trained tokens of the update, on all ranks, those with weight 0 included. Weights of whole
trajectories (sequence_truncated_is) are averaged over the trajectories that have a trained token. It differs from the
plain weights in that neither truncation, which lowers them, nor samples that the policy has left scale the step: the
size of an update no longer depends on its lag. The price is a bias of the order of 1 / tokens, and a forward
pass before the update, since the mean must be known before the first gradient.
Source: `rollout_is_batch_normalize` of verl; self-normalised estimators: Owen, Monte Carlo theory (2013) ch. 9.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrl.algorithms.loss import AddUp, Correction, LossInputs, sequence_sums


@dataclass(frozen=True, slots=True)
class BatchNormalized:
    """The `FittedCorrection` of this file: `inner`, called `name`, with weights of mean 1. `per_trajectory`: it gives
    all tokens of a trajectory one weight, which counts once."""

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
        """[2] float64: sum of the weights, and how many they are."""
        weights = self.inner(inputs)[0].double()
        shares = inputs.mask.double()
        if self.per_trajectory:
            shares = shares / sequence_sums(shares, inputs.mask, inputs.sequences).clamp(min=1)
        return torch.stack([(weights * shares).sum(), shares.sum()])
