"""Transport `collective` over gloo with the broadcasts that it makes over NCCL."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.types import Bucket, Manifest
from asyncrl.weights.transport import WeightReceiver
from asyncrl.weights.transports import build_receiver, collective

_cut = collective.broadcasts


def as_over_nccl(manifest: Manifest, bucket_bytes: int, device: torch.device) -> tuple[Bucket, ...]:
    """Replaces `collective.broadcasts`."""
    return _cut(manifest, bucket_bytes, torch.device("cuda"))


def build_packed_receiver(source: Any) -> WeightReceiver:
    """As `build_receiver`; from now on all receivers of this process do it."""
    collective.broadcasts = as_over_nccl
    return build_receiver(source)
