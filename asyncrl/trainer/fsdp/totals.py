"""The metrics of one step, summed on the device and reduced over ranks once."""

from __future__ import annotations

import torch
import torch.distributed as dist

from asyncrl.algorithms.objective import LossStatistics
from asyncrl.trainer.backend import TrainMetrics
from asyncrl.trainer.fsdp.batch import PackedBatch


class StepTotals:
    """Sums over this rank's micro-batches; nothing is read back from the device before `reduce`."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(3, dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, loss: torch.Tensor, seen: LossStatistics, batch: PackedBatch) -> None:
        """`loss` is the micro-batch's part of the objective. Every rank adds the same names in the same order."""
        self._counts[0] += loss.detach().double()
        self._counts[1] += batch.mask.sum()
        self._counts[2] += batch.num_tokens
        for name, value in seen.sums:
            self._sums[name] = self._sums.get(name, 0) + value.double()
        self._largest = torch.maximum(self._largest, seen.ratio_max.double())

    def reduce(self, grad_norms: list[float], lr: float) -> TrainMetrics:
        """The same on every rank; collective. `grad_norms`: one for each update."""
        totals = torch.cat([self._counts, *(value[None] for value in self._sums.values())])
        dist.all_reduce(totals)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        loss, trained, packed, *sums = totals.tolist()
        return TrainMetrics(
            loss=loss / len(grad_norms),
            grad_norm=sum(grad_norms) / len(grad_norms),
            lr=lr,
            ratio_max=float(self._largest),
            trained_tokens=int(trained),
            packed_tokens=int(packed),
            means=tuple((name, value / max(trained, 1)) for name, value in zip(self._sums, sums, strict=True)),
        )
