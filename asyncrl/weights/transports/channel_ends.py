"""Base classes of senders and receivers with a control channel: joining, acknowledging, and telling the peers why a
publish failed. A transport adds how the bytes move."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from asyncrl.errors import ConfigError, WeightTransferError, explain
from asyncrl.types import Digest, DigestKind, Manifest, TransferSource
from asyncrl.weights.packing import Packer, Unpacker
from asyncrl.weights.plan import check_fits
from asyncrl.weights.transport import WeightSink
from asyncrl.weights.transports.control_channel import Deadline, Kind, ReceiverChannel, SenderChannel

S = TypeVar("S", bound=TransferSource)
C = TypeVar("C", SenderChannel, ReceiverChannel)


class ChannelEnd(Generic[C]):
    """What both ends have: the control channel, and the memory that `close` frees."""

    def __init__(self) -> None:
        self._channel: C | None = None
        self._buffers: tuple[torch.Tensor, ...] = ()
        """[bucket_bytes] uint8 each."""

    def close(self) -> None:
        """Idempotent; a later `receive` joins again."""
        self._abandon()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._buffers = ()

    def _abandon(self) -> None:
        """Called after a failed publish, once the peers know of it, and by `close`."""


class ChannelSender(ChannelEnd[SenderChannel]):
    """The common part of a `WeightSender`. One thread at a time, except for `interrupt`."""

    def __init__(self, what: str, bucket_bytes: int, num_receivers: int, digest: DigestKind) -> None:
        """`what`: the transfer, in the message of an error."""
        if num_receivers < 1:
            raise ConfigError(explain(what, f"{num_receivers} receivers", "use at least 1"))
        super().__init__()
        self._bucket_bytes = bucket_bytes
        self._num_receivers = num_receivers
        self._digest: DigestKind = digest

    def send(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        if self._channel is None:
            raise WeightTransferError(explain("send weights", "the sender is closed", "call open() first"))
        check_fits(manifest, self._bucket_bytes)
        channel, deadline = self._channel, Deadline(timeout_s)
        try:
            packer = Packer(manifest, weights, self._digest)
            self._send(channel, channel.gather(manifest, deadline), packer, deadline)
            digest = packer.finish()
            channel.finish()
        except BaseException as error:
            channel.abort(f"{type(error).__name__}: {error}")
            self._abandon()
            raise
        return digest

    def interrupt(self) -> None:
        """As `WeightSender.interrupt`."""
        if (channel := self._channel) is not None:
            channel.interrupt()

    def _listen(self, endpoint: str, source: Callable[..., S], **own: Any) -> S:
        """Opens the control channel; returns the source for receivers. `own`: the transport's fields of `source`."""
        self._channel = SenderChannel(endpoint, self._num_receivers)
        return source(
            endpoint=self._channel.endpoint,
            bucket_bytes=self._bucket_bytes,
            num_receivers=self._num_receivers,
            epoch=secrets.randbits(63),
            key=self._channel.key,
            digest=self._digest,
            **own,
        )

    def _send(self, channel: SenderChannel, values: tuple[int, ...], packer: Packer, deadline: Deadline) -> None:
        """From BEGIN until every receiver has acknowledged the whole publish, packed by `packer`. `values`: of their
        READY messages."""
        raise NotImplementedError


class ChannelReceiver(ChannelEnd[ReceiverChannel], Generic[S]):
    """The common part of a `WeightReceiver`."""

    def __init__(self, source: S) -> None:
        super().__init__()
        self._source = source

    def receive(self, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        if self._channel is None:
            self._attach()
            self._channel = ReceiverChannel(self._source.endpoint, self._source.receiver, self._source.key)
        channel, deadline = self._channel, Deadline(timeout_s)
        try:
            check_fits(manifest, self._source.bucket_bytes)
            unpacker = Unpacker(manifest, sink, self._source.digest)
            num_buckets = self._receive(channel, unpacker, deadline)
            digest = unpacker.finish()
            channel.ack(num_buckets)
            channel.expect(Kind.DONE, 0, deadline, f"end publish {manifest.publish_id}")
        except BaseException as error:
            channel.fail(error)
            self._abandon()
            raise
        return digest

    def _attach(self) -> None:
        """Makes what a connected receiver keeps, before it connects."""

    def _receive(self, channel: ReceiverChannel, unpacker: Unpacker, deadline: Deadline) -> int:
        """From READY until `unpacker` has all buckets of the publish; returns their number."""
        raise NotImplementedError
