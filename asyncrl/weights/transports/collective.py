"""Sends weights to receivers anywhere: broadcasts whole buckets over a process group of its own, gloo or NCCL.

Two buckets are in transfer: while one is on the wire, the sender packs the next and the receivers unpack the previous.
Over gloo the wire itself needs the processor, so large slices are not copied: each is broadcast on its own, straight
from the tensor into the memory of the sink (`DirectSink`), and only small ones are packed together. A GPU copies faster
than any wire carries: over NCCL all are packed, so that the next tensors are gathered during a broadcast, and there are
as few broadcasts as buckets.
The group is formed at the first publish, and again after a publish failed or a receiver came back without it. Control
messages travel beside it (`control_channel.py`): a broadcast cannot name the receiver that is missing.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from asyncrl.errors import ConfigError, DeadlineExceeded, TransferEnded, WeightTransferError, explain
from asyncrl.types import Bucket, CollectiveSource, Digest, Manifest
from asyncrl.weights.digest import digest_for
from asyncrl.weights.packing import Packer, Unpacker, separate
from asyncrl.weights.plan import check_fits
from asyncrl.weights.transport import WeightSink
from asyncrl.weights.transports.control_channel import Deadline, Kind, ReceiverChannel, SenderChannel
from asyncrl.weights.transports.process_group import BroadcastFailed, BroadcastGroup, host_store, join_store

_UNDER_WAY = 2
_SMALL_SHARE = 16
"""A slice below this fraction of a bucket is packed: a broadcast of its own would cost more than the copy."""
_EXPLANATION_S = 0.5
"""After a broken broadcast: how long to wait for the error message of the process that broke it."""


class CollectiveSender:
    """Implements `WeightSender`; rank 0. One thread at a time."""

    def __init__(
        self, bucket_bytes: int, num_receivers: int, *, device: str | torch.device = "cpu", host: str = "127.0.0.1"
    ) -> None:
        """`device`: where buckets are packed; cpu broadcasts over gloo, cuda over NCCL. `host`: an address of this
        machine that receivers reach."""
        self._device = _checked(device)
        if num_receivers < 1:
            raise ConfigError(explain("a collective transfer", f"{num_receivers} receivers", "use at least 1"))
        self._bucket_bytes = bucket_bytes
        self._num_receivers = num_receivers
        self._host = host
        self._generation = 0
        self._store: dist.TCPStore | None = None
        self._group: BroadcastGroup | None = None
        self._channel: SenderChannel | None = None
        self._buffers: tuple[torch.Tensor, ...] = ()

    def open(self) -> CollectiveSource:
        self.close()
        self._store = host_store(self._host)
        self._channel = SenderChannel(f"tcp://{self._host}:*", self._num_receivers)
        self._buffers = _buffers(self._bucket_bytes, self._device)
        return CollectiveSource(
            endpoint=self._channel.endpoint,
            store=f"{self._host}:{self._store.port}",
            bucket_bytes=self._bucket_bytes,
            num_receivers=self._num_receivers,
            epoch=secrets.randbits(63),
            key=self._channel.key,
            digest=digest_for(self._device),
        )

    def send(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        if self._channel is None:
            raise WeightTransferError(explain("send weights", "the sender is closed", "call open() first"))
        check_fits(manifest, self._bucket_bytes)
        channel, deadline = self._channel, Deadline(timeout_s)
        packer = Packer(manifest, weights, digest_for(self._device))
        buckets = broadcasts(manifest, self._bucket_bytes, self._device)
        try:
            generations = channel.gather(manifest, deadline)
            group = self._begin(channel, generations, deadline)
            in_place = False
            for bucket in buckets:
                limit = 1 if in_place and packer.moves_on(bucket) else _UNDER_WAY
                while group.under_way >= limit:
                    self._wait_sent(channel, group, deadline)
                channel.check()
                data = packer.view(bucket, self._buffers[0].device)
                in_place = data is not None
                if data is None:
                    data = self._buffers[bucket.index % _UNDER_WAY][: bucket.nbytes]
                    packer.pack(bucket, data)
                group.start(data, deadline)
            digest = packer.finish()
            while group.under_way:
                self._wait_sent(channel, group, deadline)
            channel.wait_acked(len(buckets), deadline)
            channel.finish()
        except BaseException as error:
            channel.abort(f"{type(error).__name__}: {error}")
            self._drop_group()
            raise
        return digest

    def interrupt(self) -> None:
        """As `Interruptible.interrupt`."""
        if (channel := self._channel) is not None:
            channel.interrupt()

    def close(self) -> None:
        self._drop_group()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._store = None
        self._buffers = ()

    def _begin(self, channel: SenderChannel, generations: tuple[int, ...], deadline: Deadline) -> BroadcastGroup:
        """The group of all receivers; a new one unless all of them still have the last one."""
        if self._group is not None and set(generations) == {self._group.generation}:
            channel.tell(Kind.BEGIN, self._group.generation)
            return self._group
        assert self._store is not None, "an open sender hosts a store"
        self._drop_group()
        self._generation += 1
        self._group = BroadcastGroup(self._store, self._generation, 0, self._num_receivers + 1, self._device)
        channel.tell(Kind.BEGIN, self._generation)
        with _explained(channel, self._group):
            self._group.form(deadline, channel.watch)
        return self._group

    def _wait_sent(self, channel: SenderChannel, group: BroadcastGroup, deadline: Deadline) -> None:
        with _explained(channel, group):
            group.wait(deadline, "send a bucket to all receivers", channel.watch)

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class CollectiveReceiver:
    """Implements `WeightReceiver`; rank `source.receiver + 1`."""

    def __init__(self, source: CollectiveSource, *, device: str | torch.device = "cpu") -> None:
        self._source = source
        self._device = _checked(device)
        self._store: dist.TCPStore | None = None
        self._group: BroadcastGroup | None = None
        self._channel: ReceiverChannel | None = None
        self._buffers: tuple[torch.Tensor, ...] = ()

    def receive(self, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        if self._channel is None:
            self._channel = ReceiverChannel(self._source.endpoint, self._source.receiver, self._source.key)
            self._buffers = _buffers(self._source.bucket_bytes, self._device)
        channel, deadline = self._channel, Deadline(timeout_s)
        unpacker = Unpacker(manifest, sink, self._source.digest)
        buckets = broadcasts(manifest, self._source.bucket_bytes, self._device)
        places: deque[torch.Tensor | None] = deque()

        def start(bucket: Bucket) -> None:
            places.append(unpacker.destination(bucket, self._buffers[0].device))
            group.start(self._buffer(bucket) if places[-1] is None else places[-1], deadline)

        try:
            check_fits(manifest, self._source.bucket_bytes)
            group = self._join(channel, manifest, deadline)
            for bucket in buckets[:_UNDER_WAY]:
                start(bucket)
            for bucket in buckets:
                self._wait_received(channel, group, deadline, f"receive bucket {bucket.index}")
                place = places.popleft()
                if place is None:
                    unpacker.unpack(bucket, self._buffer(bucket))
                else:
                    unpacker.landed(bucket, place)
                channel.ack(bucket.index)
                if bucket.index + _UNDER_WAY < len(buckets):
                    start(buckets[bucket.index + _UNDER_WAY])
            digest = unpacker.finish()
            channel.ack(len(buckets))
            channel.expect(Kind.DONE, 0, deadline, f"end publish {manifest.publish_id}")
        except BaseException as error:
            channel.fail(error)
            self._drop_group()
            raise
        return digest

    def close(self) -> None:
        """Idempotent; a later `receive` joins again."""
        self._drop_group()
        self._store = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._buffers = ()

    def _join(self, channel: ReceiverChannel, manifest: Manifest, deadline: Deadline) -> BroadcastGroup:
        channel.join(manifest, 0 if self._group is None else self._group.generation)
        generation = channel.expect(Kind.BEGIN, None, deadline, f"begin publish {manifest.publish_id}").value
        if self._group is None or self._group.generation != generation:
            self._drop_group()
            if self._store is None:
                self._store = join_store(self._source.store, deadline)
            rank, world_size = self._source.receiver + 1, self._source.num_receivers + 1
            self._group = BroadcastGroup(self._store, generation, rank, world_size, self._device)
            self._group.form(deadline, lambda: channel.check("form the group of a publish"))
        return self._group

    def _wait_received(self, channel: ReceiverChannel, group: BroadcastGroup, deadline: Deadline, what: str) -> None:
        """Waits for the oldest broadcast. An error that the sender sent takes precedence over an error of the group."""
        try:
            group.wait(deadline, what, lambda: channel.check(what))
        except (DeadlineExceeded, BroadcastFailed) as error:
            group.close()
            try:
                channel.next(Deadline(2 * _EXPLANATION_S), what)  # the sender asks the others first
            except DeadlineExceeded:
                if isinstance(error, BroadcastFailed):  # a connection of the group broke: no fault of this side
                    raise TransferEnded(str(error)) from None
                raise error from None
            raise

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        return self._buffers[bucket.index % _UNDER_WAY][: bucket.nbytes]

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


@contextmanager
def _explained(channel: SenderChannel, group: BroadcastGroup) -> Iterator[None]:
    """Ends the group at once on an error: nothing of it may run on, or be found late by a watchdog, during the search
    for the cause. Then adds the reports of receivers, and the names of slow ones, to an error of the group. A broken
    connection is the consequence of an error that a receiver reports, which is raised instead. A deadline remains a
    deadline."""
    try:
        yield
    except (DeadlineExceeded, BroadcastFailed) as error:
        group.close()
        explanation, reported = Deadline(_EXPLANATION_S), ""
        try:
            while explanation.remaining_s():
                channel.check(explanation.remaining_s())
        except (DeadlineExceeded, WeightTransferError) as cause:
            if not isinstance(error, DeadlineExceeded):
                raise
            reported = f"\nreported: {cause}"
        kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else WeightTransferError
        raise kind(f"{error}\nbehind: {channel.laggards()}{reported}") from error


def broadcasts(manifest: Manifest, bucket_bytes: int, device: torch.device) -> tuple[Bucket, ...]:
    """The buckets as they are broadcast; both sides cut them the same way. `device`: of either side; a group has one
    kind."""
    if device.type == "cuda":
        return manifest.buckets
    return separate(manifest.buckets, max(1, bucket_bytes // _SMALL_SHARE))


def _buffers(bucket_bytes: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(_UNDER_WAY))


def _checked(device: str | torch.device) -> torch.device:
    checked = torch.device(device)
    if checked.type not in ("cpu", "cuda"):
        raise ConfigError(explain("weights.transport=collective", f"device {checked}", "use cpu or cuda"))
    return checked
