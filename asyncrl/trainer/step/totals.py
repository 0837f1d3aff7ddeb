"""The metrics of one step, summed on the device and reduced over ranks once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.algorithms import by_lag
from asyncrl.trainer.step.batch import PackedBatch
from asyncrl.trainer.step.model import Part, Peers
from asyncrl.types import TrainMetrics
from asyncrl.types.metrics import Metric

RETURNS, RETURNS_SQUARED, ERRORS, ERRORS_SQUARED = "_returns", "_returns_squared", "_errors", "_errors_squared"
"""Sums over the trained tokens behind critic/explained_variance: returns, and returns minus values."""

Sums = Sequence[tuple[str, torch.Tensor]]


class StepTotals:
    """Sums over this rank's micro-batches; nothing is copied from the device before `reduce`."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(3, dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)
        self._by_lag = torch.zeros(by_lag.SHAPE, dtype=torch.float64, device=device)
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, part: Part, batch: PackedBatch) -> None:
        """`part`: of the policy. Every rank must add the same names in the same order."""
        self._counts[0] += part.loss.double()
        self._counts[1] += batch.mask.sum()
        self._counts[2] += batch.num_tokens
        self.add_sums(part.seen.sums)
        assert part.seen.by_lag is not None, "a part of the policy"
        self._by_lag += part.seen.by_lag
        self._largest = torch.maximum(self._largest, part.seen.ratio_max.double())

    def add_sums(self, sums: Sums) -> None:
        """(metric, sum over the trained tokens of the micro-batch)."""
        for name, value in sums:
            self._sums[name] = self._sums.get(name, 0) + value.double()

    def reduce(
        self, peers: Peers, grad_norms: list[float], lr: float, critic_norms: list[float], skipped_updates: int
    ) -> TrainMetrics:
        """The metrics, the same on every rank; collective. `grad_norms`, `critic_norms`: one per update; empty without
        a critic."""
        # One reduction for all sums: its order is the order of the names, which is the same on every rank.
        totals = peers.add_up(
            torch.cat([self._counts, self._by_lag.flatten(), *(value[None] for value in self._sums.values())])
        )
        largest = peers.largest(self._largest)
        counts, of_lags, rest = totals.split([3, self._by_lag.numel(), len(self._sums)])
        loss, trained, packed = counts.tolist()
        means = {name: value / max(trained, 1) for name, value in zip(self._sums, rest.tolist(), strict=True)}
        means |= by_lag.means_by_lag(of_lags.reshape(by_lag.SHAPE))
        if critic_norms:
            means[Metric.CRITIC_GRAD_NORM] = sum(critic_norms) / len(critic_norms)
            means[Metric.CRITIC_EXPLAINED] = _explained_variance(means)
        return TrainMetrics(
            loss=loss / len(grad_norms),
            grad_norm=sum(grad_norms) / len(grad_norms),
            lr=lr,
            ratio_max=float(largest),
            trained_tokens=int(trained),
            packed_tokens=int(packed),
            means=tuple((name, value) for name, value in means.items() if not name.startswith("_")),
            skipped_updates=skipped_updates,
        )


def _explained_variance(means: dict[str, float]) -> float:
    """1: the values equal the returns; 0: they predict no better than the mean return, or all returns are equal."""
    spread = means[RETURNS_SQUARED] - means[RETURNS] ** 2
    unexplained = means[ERRORS_SQUARED] - means[ERRORS] ** 2
    return 1 - unexplained / spread if spread > 1e-12 else 0.0
