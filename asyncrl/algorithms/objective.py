"""The function that an update minimises: a policy loss, weighted by corrections, with regularisers. Pure functions of
tensors.

    objective = sum_t w_t (prod_c c_t loss_t + kl_coefficient KL_t + distillation_coefficient D_t
                           - entropy_coefficient H_t)

w_t is the token's share of the update (`LossInputs.weights`), so the sum over all ranks and micro-batches is the
objective of the update for any packing. A token that a correction drops keeps its share: the other tokens are not
scaled up, and the regularisers still apply to the token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from asyncrl.algorithms.by_lag import sums_by_lag
from asyncrl.algorithms.distillation import distilled_advantages, reverse_kl, top_reverse_kl
from asyncrl.algorithms.kl import importance_weighted, kl_estimate
from asyncrl.algorithms.loss import Correction, Loss, LossInputs, bounded_ratio, masked, masked_log_ratio
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.types.metrics import Metric


@dataclass(frozen=True, slots=True, eq=False)
class LossStatistics:
    """Over the True entries of one mask: `sums` of (metric, scalar), to be divided by the trained tokens, and the
    largest `ratio_max` (0 where the mask is empty). They carry no gradient. `by_lag`: see `sums_by_lag`; None where
    there is no policy loss."""

    sums: tuple[tuple[str, torch.Tensor], ...]
    ratio_max: torch.Tensor
    by_lag: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """Built from the recipe by `build_objective`. `corrections`: (name, correction), applied in order."""

    loss: Loss
    corrections: tuple[tuple[str, Correction], ...]
    config: AlgorithmConfig

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, LossStatistics]:
        """The micro-batch's part of the objective, a scalar float32 with gradient, and its statistics."""
        # A teacher without top k acts through the advantages; with top k its divergence is a term of the loss.
        teacher, likeliest, own = inputs.teacher_logprobs, inputs.teacher_top_logprobs, inputs.top_logprobs
        top = None if likeliest is None or own is None else top_reverse_kl(own, likeliest, inputs.mask)
        if teacher is not None and top is None:
            advantages = distilled_advantages(
                inputs.advantages, inputs.logprobs, teacher, inputs.mask, self.config.distillation.coefficient
            )
            inputs = replace(inputs, advantages=advantages)
        # Corrections weight the policy loss only; the regularisers below are added at full weight.
        factors = [(name, *correction(inputs)) for name, correction in self.corrections]
        tokens = self.loss(inputs)
        for _, factor, _ in factors:
            tokens = tokens * factor
        kl = self.config.kl
        reference = inputs.reference_logprobs
        if reference is not None and kl.place == "loss":
            estimate = kl_estimate(inputs.logprobs, reference, kl.estimator, inputs.mask)
            if kl.importance_weighted:
                estimate = importance_weighted(estimate, inputs.logprobs, inputs.behavior_logprobs, inputs.mask)
            tokens = tokens + kl.coefficient * masked(estimate, inputs.mask)
        if top is not None:
            tokens = tokens + self.config.distillation.coefficient * top
        if self.config.entropy_coefficient:
            tokens = tokens - self.config.entropy_coefficient * masked(inputs.entropy, inputs.mask)
        total = (masked(inputs.weights, inputs.mask) * tokens).sum()
        statistics = self._statistics(inputs, [(name, touched) for name, _, touched in factors])
        if top is not None:
            statistics = replace(statistics, sums=(*statistics.sums, (Metric.KL_TEACHER_TOP, top.detach().sum())))
        return total, statistics

    def _statistics(self, inputs: LossInputs, touched: list[tuple[str, torch.Tensor]]) -> LossStatistics:
        with torch.no_grad():
            mask = inputs.mask
            # Measured against the behaviour policy for every `algorithm.ratio`.
            log_ratio = masked_log_ratio(inputs.logprobs, inputs.behavior_logprobs, mask)
            ratio = masked(bounded_ratio(log_ratio), mask)
            clipped = self.loss.clipped(inputs)
            halves = clipped & (inputs.advantages > 0), clipped & (inputs.advantages < 0)
            sums = [
                (Metric.CLIPPED, clipped.sum()),
                (Metric.CLIPPED_POSITIVE, halves[0].sum()),
                (Metric.CLIPPED_NEGATIVE, halves[1].sum()),
                (Metric.RATIO_MEAN, ratio.sum()),
                (Metric.KL_BEHAVIOR, -log_ratio.sum()),
                (Metric.ENTROPY, masked(inputs.entropy, mask).sum()),
                *((Metric.TOUCHED.of(name), tokens.sum()) for name, tokens in touched),
            ]
            if (reference := inputs.reference_logprobs) is not None:
                estimate = kl_estimate(inputs.logprobs, reference, "k3", mask)
                sums.append((Metric.KL_REFERENCE, masked(estimate, mask).sum()))
            if (teacher := inputs.teacher_logprobs) is not None:
                sums.append((Metric.KL_TEACHER, reverse_kl(inputs.logprobs, teacher, mask).sum()))
            largest = ratio.max() if ratio.numel() else ratio.new_zeros(())
            by_lag = sums_by_lag(inputs.lags, mask, ratio, halves, -log_ratio)
            return LossStatistics(tuple(sums), largest, by_lag)
