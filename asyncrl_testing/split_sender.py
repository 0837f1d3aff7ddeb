"""Several senders of one publish in one process, each for a part of its tensors. In a run they are trainer ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from asyncrl.types import Digest, Manifest, PartsSource
from asyncrl.weights.plan import part_manifests
from asyncrl.weights.transports.control_channel import Deadline
from asyncrl.weights.transports.interruptible_sender import InterruptibleSender


class SplitSender:
    """Implements `WeightSender`."""

    def __init__(self, senders: Sequence[InterruptibleSender], first_tensors: Sequence[int], bucket_bytes: int) -> None:
        self._senders, self._first_tensors, self._bucket_bytes = senders, tuple(first_tensors), bucket_bytes

    def open(self) -> PartsSource:
        return PartsSource.of([sender.open() for sender in self._senders], self._first_tensors)

    def send(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        deadline, digest, left = Deadline(timeout_s), (), iter(weights)
        parts = part_manifests(manifest, self._first_tensors, self._bucket_bytes)
        for sender, part in zip(self._senders, parts, strict=True):
            own = left if sender is self._senders[-1] else islice(left, len(part.tensors))
            digest += sender.send(part, own, deadline.remaining_s()) or ()
        return digest if manifest.verify else None

    def interrupt(self) -> None:
        self.close()  # from another thread, a guarded sender ends its send in progress

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


def guarded(
    senders: Sequence[InterruptibleSender], first_tensors: Sequence[int], bucket_bytes: int
) -> InterruptibleSender:
    return InterruptibleSender(SplitSender(senders, first_tensors, bucket_bytes))
