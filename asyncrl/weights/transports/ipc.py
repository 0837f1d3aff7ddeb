"""Weights to receivers on the same machine: a ring of slots in shared memory that every receiver reads in place.

The sender writes a bucket once, whatever the number of receivers; with two slots and more it fills one while the
receivers read another. A slot is written again only after every receiver has acknowledged it. Small slots win: a bucket
of a few MiB is still in the processor's cache when the receivers read it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable

import torch

from asyncrl.errors import ConfigError, WeightTransferError, explain
from asyncrl.types import Manifest
from asyncrl.weights.packing import Packer, Unpacker, check_fits
from asyncrl.weights.transport import Digest, TransferSource, WeightSink
from asyncrl.weights.transports.channel import Deadline, Kind, ReceiverChannel, SenderChannel
from asyncrl.weights.transports.segment import Segment, attach

_PAGE_BYTES = 4096


class IpcSender:
    """Implements `WeightSender`. One thread at a time."""

    def __init__(self, bucket_bytes: int, num_receivers: int, *, num_slots: int = 2) -> None:
        """`num_slots`: buckets that can be under way at once; the memory is `num_slots * bucket_bytes`."""
        if num_slots < 1 or num_receivers < 1:
            raise ConfigError(
                explain("an ipc transfer", f"{num_slots} slots, {num_receivers} receivers", "use at least 1 of each")
            )
        self._bucket_bytes = bucket_bytes
        self._num_receivers = num_receivers
        self._num_slots = num_slots
        self._segment: Segment | None = None
        self._channel: SenderChannel | None = None

    def open(self) -> TransferSource:
        self.close()
        self._segment = Segment(_slot_bytes(self._bucket_bytes) * self._num_slots)
        self._channel = SenderChannel(f"ipc://{self._segment.socket_path}", self._num_receivers)
        os.chmod(self._segment.socket_path, 0o600)
        return TransferSource(
            transport="ipc",
            address=self._channel.endpoint,
            segment=str(self._segment.path),
            bucket_bytes=self._bucket_bytes,
            num_receivers=self._num_receivers,
            receiver=0,
            epoch=secrets.randbits(63),
        )

    def send(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        if self._segment is None or self._channel is None:
            raise WeightTransferError(explain("send weights", "the sender is closed", "call open() first"))
        check_fits(manifest, self._bucket_bytes)
        channel, deadline = self._channel, Deadline(timeout_s)
        slots = _slots(self._segment.data, self._bucket_bytes)
        packer = Packer(manifest, weights)
        try:
            channel.gather(manifest, deadline)
            channel.tell(Kind.BEGIN)
            for bucket in manifest.buckets:
                channel.wait_acked(bucket.index - len(slots), deadline)
                packer.pack(bucket, slots[bucket.index % len(slots)])
                channel.tell(Kind.BUCKET, bucket.index)
            digest = packer.finish()
            channel.wait_acked(len(manifest.buckets), deadline)
            channel.finish()
        except Exception as error:
            channel.abort(f"{type(error).__name__}: {error}")
            raise
        return digest

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class IpcReceiver:
    """Implements `WeightReceiver`. The sink's views lie in the ring itself: nothing is copied on the way to it."""

    def __init__(self, source: TransferSource) -> None:
        self._source = source
        self._channel: ReceiverChannel | None = None
        self._slots: tuple[torch.Tensor, ...] = ()

    def receive(self, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        channel, deadline = self._attach(), Deadline(timeout_s)
        unpacker = Unpacker(manifest, sink)
        try:
            check_fits(manifest, self._source.bucket_bytes)
            channel.join(manifest)
            channel.expect(Kind.BEGIN, 0, deadline, f"begin publish {manifest.publish_id}")
            for bucket in manifest.buckets:
                what = f"read bucket {bucket.index} of {len(manifest.buckets)}"
                channel.expect(Kind.BUCKET, bucket.index, deadline, what)
                unpacker.unpack(bucket, self._slots[bucket.index % len(self._slots)])
                channel.ack(bucket.index)
            digest = unpacker.finish()
            channel.ack(len(manifest.buckets))
            channel.expect(Kind.DONE, 0, deadline, f"end publish {manifest.publish_id}")
        except Exception as error:
            channel.fail(error)
            raise
        return digest

    def close(self) -> None:
        """Idempotent; a later `receive` joins again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._slots = ()

    def _attach(self) -> ReceiverChannel:
        if self._channel is None:
            self._slots = _slots(attach(self._source.segment), self._source.bucket_bytes)
            self._channel = ReceiverChannel(self._source.address, self._source.receiver)
        return self._channel


def _slot_bytes(bucket_bytes: int) -> int:
    """Slots begin on pages, so that neighbours share no cache line."""
    return bucket_bytes + -bucket_bytes % _PAGE_BYTES


def _slots(segment: torch.Tensor, bucket_bytes: int) -> tuple[torch.Tensor, ...]:
    """Views of [slot bytes] uint8 each."""
    return segment.split(_slot_bytes(bucket_bytes))
