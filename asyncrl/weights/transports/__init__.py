"""The weight transports by name. The conformance suite is `asyncrl_testing.transport_suite`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from asyncrl.errors import ConfigError, explain
from asyncrl.types import CollectiveSource, Digest, DiskSource, IpcSource, Manifest, PartsSource, TransferSource
from asyncrl.weights.object_store import is_url
from asyncrl.weights.plan import part_manifests
from asyncrl.weights.transport import WeightReceiver, WeightSender, WeightSink
from asyncrl.weights.transports.collective import CollectiveReceiver, CollectiveSender, NativeSender
from asyncrl.weights.transports.control_channel import Deadline
from asyncrl.weights.transports.disk import DiskReceiver, DiskSender
from asyncrl.weights.transports.interruptible_sender import InterruptibleSender
from asyncrl.weights.transports.ipc import IpcReceiver, IpcSender
from asyncrl.weights.transports.objects import ObjectReceiver, ObjectSender

TRANSPORTS = "ipc", "collective", "disk"


def build_sender(
    transport: str,
    bucket_bytes: int,
    num_receivers: int,
    *,
    device: str | torch.device = "cpu",
    host: str = "127.0.0.1",
    directory: str = "",
) -> InterruptibleSender:
    """The sender of `weights.transport`, not yet open; "native": vLLM's own, for `rollout.remote.weights=native`.

    Args:
        device: where the trainer's tensors live; selects gloo or NCCL for `collective`, and the rings of `ipc`.
        host: an address of this machine that the replicas reach; unused by `ipc`.
        directory: `weights.disk_directory`, for `disk`; a URL for object storage.

    Raises:
        ConfigError: unknown transport, or it does not support the device.
    """
    if transport not in (*TRANSPORTS, "native"):
        raise _unknown(transport)
    senders: dict[str, Callable[[], WeightSender]] = {
        "ipc": lambda: IpcSender(bucket_bytes, num_receivers, device=device),
        "collective": lambda: CollectiveSender(bucket_bytes, num_receivers, device=device, host=host),
        "native": lambda: NativeSender(bucket_bytes, num_receivers, device=device, host=host),
        "disk": lambda: DiskSender(bucket_bytes, num_receivers, host=host, directory=directory),
        "objects": lambda: ObjectSender(bucket_bytes, num_receivers, host=host, url=directory),
    }
    return InterruptibleSender(senders["objects" if transport == "disk" and is_url(directory) else transport]())


def build_receiver(source: TransferSource, *, device: str | torch.device = "cpu") -> WeightReceiver:
    """The receiver that joins `source`. `device`: where the sink's tensors live; for `collective` of the sender's kind.
    Raises ConfigError: unknown transport."""
    if isinstance(source, PartsSource):
        parts = [replace(part, receiver=source.receiver) for part in source.parts]
        return PartsReceiver(source, [build_receiver(part, device=device) for part in parts])
    if isinstance(source, CollectiveSource):
        return CollectiveReceiver(source, device=device)
    if isinstance(source, DiskSource):
        return ObjectReceiver(source) if is_url(source.directory) else DiskReceiver(source)
    if isinstance(source, IpcSource):
        return IpcReceiver(source, device=device)
    raise _unknown(type(source).__name__)


def _unknown(transport: str) -> ConfigError:
    do = f"use one of {', '.join(TRANSPORTS)}"
    return ConfigError(explain(f"weights.transport={transport}", "no such transport", do))


# Receives a publish that several trainer ranks send, each a run of its tensors, over any transport.


class PartsReceiver:
    """Implements `WeightReceiver`. Owns the receivers of all parts."""

    def __init__(self, source: PartsSource, receivers: Sequence[WeightReceiver]) -> None:
        """`receivers`: one for each of `source.parts`."""
        self._source, self._receivers = source, receivers

    def receive(self, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        deadline, digest = Deadline(timeout_s), ()
        parts = part_manifests(manifest, self._source.first_tensors, self._source.bucket_bytes)
        for receiver, part in zip(self._receivers, parts, strict=True):
            digest += receiver.receive(part, sink, deadline.remaining_s()) or ()
        return digest if manifest.verify else None

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
