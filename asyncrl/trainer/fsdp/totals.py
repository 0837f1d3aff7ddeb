"""The metrics of one optimizer step, summed on the device and reduced over ranks once."""

from __future__ import annotations

import torch
import torch.distributed as dist

from asyncrl.algorithms.loss import LossStatistics
from asyncrl.trainer.backend import TrainMetrics
from asyncrl.trainer.fsdp.batch import PackedBatch


class StepTotals:
    """Sums over this rank's micro-batches; nothing is read back from the device before `reduce`."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(7, dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, seen: LossStatistics, entropy: torch.Tensor, batch: PackedBatch) -> None:
        """`loss` is normalised already; `entropy` [n] is that of the predicted tokens."""
        mask = batch.mask
        sums = (loss.detach(), seen.clipped, seen.ratio, seen.kl, torch.where(mask, entropy, 0).sum(), mask.sum())
        self._sums[:6] += torch.stack([x.double() for x in sums])
        self._sums[6] += batch.num_tokens
        self._largest = torch.maximum(self._largest, seen.ratio_max.double())

    def reduce(self, grad_norm: float, lr: float) -> TrainMetrics:
        """The same on every rank; collective."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        loss, clipped, ratio, kl, entropy, trained, packed = self._sums.tolist()
        count = max(trained, 1)
        return TrainMetrics(
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            clip_fraction=clipped / count,
            ratio_mean=ratio / count,
            ratio_max=float(self._largest),
            kl_behavior=kl / count,
            entropy=entropy / count,
            trained_tokens=int(trained),
            packed_tokens=int(packed),
        )
