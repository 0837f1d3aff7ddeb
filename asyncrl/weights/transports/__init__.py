"""The weight transports by name. The conformance suite is `asyncrl.testing.transport_suite`."""

from __future__ import annotations

import torch

from asyncrl.errors import ConfigError, explain
from asyncrl.weights.transport import TransferSource, WeightReceiver, WeightSender
from asyncrl.weights.transports.collective import CollectiveReceiver, CollectiveSender
from asyncrl.weights.transports.disk import DiskReceiver, DiskSender
from asyncrl.weights.transports.guard import GuardedSender
from asyncrl.weights.transports.ipc import IpcReceiver, IpcSender

TRANSPORTS = {
    "ipc": (IpcSender, IpcReceiver),
    "collective": (CollectiveSender, CollectiveReceiver),
    "disk": (DiskSender, DiskReceiver),
}


def build_sender(
    transport: str,
    bucket_bytes: int,
    num_receivers: int,
    *,
    device: str | torch.device = "cpu",
    host: str = "127.0.0.1",
    directory: str = "",
) -> GuardedSender:
    """The sender of `weights.transport`, not yet open.

    Args:
        device: where the trainer's tensors live; chooses gloo or NCCL for `collective`, the rings of `ipc`.
        host: an address of this machine that the replicas reach; for `collective` and `disk` across machines.
        directory: `weights.disk_directory`, for `disk`.

    Raises:
        ConfigError: unknown transport, or one that cannot serve the device.
    """
    _require_known(transport)
    sender: WeightSender
    if transport == "collective":
        sender = CollectiveSender(bucket_bytes, num_receivers, device=device, host=host)
    elif transport == "disk":
        sender = DiskSender(bucket_bytes, num_receivers, host=host, directory=directory)
    else:
        sender = IpcSender(bucket_bytes, num_receivers, device=device)
    return GuardedSender(sender)


def build_receiver(source: TransferSource, *, device: str | torch.device = "cpu") -> WeightReceiver:
    """The receiver that joins `source`. `device`: where the sink's tensors live; for `collective` of the sender's kind.
    Raises ConfigError: unknown transport."""
    _require_known(source.transport)
    if source.transport == "collective":
        return CollectiveReceiver(source, device=device)
    if source.transport == "disk":
        return DiskReceiver(source)
    return IpcReceiver(source, device=device)


def _require_known(transport: str) -> None:
    if transport not in TRANSPORTS:
        raise ConfigError(
            explain(f"weights.transport={transport}", "no such transport", f"use one of {', '.join(TRANSPORTS)}")
        )
