"""Sends weights to receivers anywhere: broadcasts whole buckets over a process group of its own, gloo or NCCL.

Two buckets are in transfer: while one is on the wire, the sender packs the next and the receivers unpack the previous.
Over gloo the transfer itself uses the CPU, so large slices are not copied: each is broadcast on its own, from the
tensor into the sink's memory (`DirectSink`), and only small slices are packed together. A GPU copies faster than the
network sends: over NCCL all slices are packed, so that the next tensors are gathered during a broadcast and each bucket
takes one broadcast. The group is formed at the first publish, and again after a failed publish or when a receiver
rejoins without it. Control messages use their own connection (`control_channel.py`), because a broadcast cannot name
the receiver that is missing.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.errors import ConfigError, DeadlineExceeded, TransferEnded, WeightTransferError, explain
from asyncrl.types import Bucket, CollectiveSource, Manifest
from asyncrl.weights.digest import digest_for
from asyncrl.weights.object_store import in_thread
from asyncrl.weights.packing import Packer, Unpacker, separate
from asyncrl.weights.transports.blocking import wait_for
from asyncrl.weights.transports.channel_ends import C, ChannelEnd, ChannelReceiver, ChannelSender
from asyncrl.weights.transports.control_channel import Deadline, Kind, ReceiverChannel, SenderChannel
from asyncrl.weights.transports.process_group import BroadcastFailed, BroadcastGroup, host_store, join_store

_UNDER_WAY = 2
_SMALL_SHARE = 16
"""A slice below 1/`_SMALL_SHARE` of a bucket is packed: its own broadcast would cost more than the copy."""
_EXPLANATION_S = 0.5
"""After a broken broadcast: seconds to wait for the error message of the failed process."""


class _Member(ChannelEnd[C]):
    """What both ends have: the group, and the store at which it meets."""

    _store: dist.TCPStore | None = None
    _group: BroadcastGroup | None = None

    def close(self) -> None:
        super().close()
        self._store = None

    def _abandon(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class CollectiveSender(_Member[SenderChannel], ChannelSender):
    """Implements `WeightSender`; rank 0."""

    def __init__(
        self, bucket_bytes: int, num_receivers: int, *, device: str | torch.device = "cpu", host: str = "127.0.0.1"
    ) -> None:
        """`device`: where buckets are packed; cpu broadcasts over gloo, cuda over NCCL. `host`: an address of this
        machine that receivers reach."""
        self._device = _checked(device)
        super().__init__("a collective transfer", bucket_bytes, num_receivers, digest_for(self._device))
        self._host = host
        self._generation = 0

    def open(self) -> CollectiveSource:
        self.close()
        self._store = host_store(self._host)
        self._buffers = _buffers(self._bucket_bytes, self._device)
        store = f"{self._host}:{self._store.port}"
        return self._listen(f"tcp://{self._host}:*", CollectiveSource, store=store)

    def _send(self, channel: SenderChannel, values: tuple[int, ...], packer: Packer, deadline: Deadline) -> None:
        buckets = broadcasts(packer.manifest, self._bucket_bytes, self._device)
        group = self._begin(channel, values, deadline)
        in_place = False
        for bucket in buckets:
            # A bucket sent in place is read until its broadcast ends, so its tensor must not be replaced before.
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
        # All buckets are started; acknowledgements come only after the last broadcast has landed.
        while group.under_way:
            self._wait_sent(channel, group, deadline)
        channel.wait_acked(len(buckets), deadline)

    def _begin(self, channel: SenderChannel, generations: tuple[int, ...], deadline: Deadline) -> BroadcastGroup:
        """The group of all receivers, reused only if every receiver still has the last one."""
        if self._group is not None and set(generations) == {self._group.generation}:
            channel.tell(Kind.BEGIN, self._group.generation)
            return self._group
        assert self._store is not None, "an open sender hosts a store"
        self._abandon()
        self._generation += 1
        self._group = BroadcastGroup(self._store, self._generation, 0, self._num_receivers + 1, self._device)
        channel.tell(Kind.BEGIN, self._generation)
        with _explained(channel, self._group):
            self._group.form(deadline, channel.watch)
        return self._group

    def _wait_sent(self, channel: SenderChannel, group: BroadcastGroup, deadline: Deadline) -> None:
        with _explained(channel, group):
            group.wait(deadline, "send a bucket to all receivers", channel.watch)


class CollectiveReceiver(_Member[ReceiverChannel], ChannelReceiver[CollectiveSource]):
    """Implements `WeightReceiver`; rank `source.receiver + 1`."""

    def __init__(self, source: CollectiveSource, *, device: str | torch.device = "cpu") -> None:
        super().__init__(source)
        self._device = _checked(device)

    def _receive(self, channel: ReceiverChannel, unpacker: Unpacker, deadline: Deadline) -> int:
        buckets = broadcasts(unpacker.manifest, self._source.bucket_bytes, self._device)
        places: deque[torch.Tensor | None] = deque()

        def start(bucket: Bucket) -> None:
            places.append(unpacker.destination(bucket, self._buffers[0].device))
            group.start(self._buffer(bucket) if places[-1] is None else places[-1], deadline)

        group = self._join(channel, unpacker.manifest, deadline)
        # Broadcasts match by order: post the first two, then one per bucket that is done.
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
            # The buffer is free again: post the bucket that reuses it.
            if bucket.index + _UNDER_WAY < len(buckets):
                start(buckets[bucket.index + _UNDER_WAY])
        return len(buckets)

    def _attach(self) -> None:
        self._buffers = _buffers(self._source.bucket_bytes, self._device)

    def _join(self, channel: ReceiverChannel, manifest: Manifest, deadline: Deadline) -> BroadcastGroup:
        generation = channel.join(manifest, deadline, 0 if self._group is None else self._group.generation)
        if self._group is None or self._group.generation != generation:
            self._abandon()
            if self._store is None:
                self._store = join_store(self._source.store, deadline)
            rank, world_size = self._source.receiver + 1, self._source.num_receivers + 1
            self._group = BroadcastGroup(self._store, generation, rank, world_size, self._device)
            self._group.form(deadline, lambda: channel.check("form the group of a publish"))
        return self._group

    def _wait_received(self, channel: ReceiverChannel, group: BroadcastGroup, deadline: Deadline, what: str) -> None:
        """Waits for the oldest broadcast. An error sent by the sender takes precedence over an error of the group."""
        try:
            group.wait(deadline, what, lambda: channel.check(what))
        except (DeadlineExceeded, BroadcastFailed) as error:
            group.close()
            try:
                channel.next(Deadline(2 * _EXPLANATION_S), what)  # twice: the sender queries the other receivers first
            except DeadlineExceeded:
                if isinstance(error, BroadcastFailed):  # a peer's connection broke: not caused here
                    raise TransferEnded(str(error)) from None
                raise error from None
            raise

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        return self._buffers[bucket.index % _UNDER_WAY][: bucket.nbytes]


@contextmanager
def _explained(channel: SenderChannel, group: BroadcastGroup) -> Iterator[None]:
    """Closes the group immediately on an error, so that no broadcast continues, or trips a watchdog, during the search
    for the cause. Then adds the receivers' reports and the names of slow receivers to the error. If a receiver explains
    a broken connection, its report is raised instead. A missed deadline stays DeadlineExceeded."""
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
        kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else TransferEnded
        raise kind(f"{error}\nbehind: {channel.laggards()}{reported}") from error


def broadcasts(manifest: Manifest, bucket_bytes: int, device: torch.device) -> tuple[Bucket, ...]:
    """The buckets as broadcast; both sides compute the same list, since a group has one kind of `device`."""
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


# vLLM's own sender, to servers that run none of our code (`rollout.remote.weights=native`). Its wire is NCCL, and its
# calls are vLLM's HTTP endpoints: the replica of each server makes them, in step with the sender by our control
# channel. Value of BEGIN: generation << 16 | port at which the group of this generation meets.

_PACKED = {"packed": True, "packed_num_buffers": 2}
"""What both sides of vLLM's wire must agree on, with the size of a buffer."""


class _OfReplicas:
    """vLLM's `VLLMWeightSyncClient`, whose calls the replicas make."""

    def init_weight_transfer_engine(self, init_info: Any) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class _Weights:
    """vLLM's `WeightSource`: the tensors of one publish. vLLM's thread reads them, and none after `end`: whoever
    gathers them goes on in another thread."""

    def __init__(self, packer: Packer) -> None:
        self._specs, self._tensors = packer.manifest.tensors, packer.whole()
        self._lock = threading.Lock()
        self.failure: Exception | None = None
        """Why there are no more: an error of the trainer, or `end`."""

    def end(self) -> None:
        with self._lock:
            self.failure = TransferEnded("the publish has ended")

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(spec.name, getattr(torch, spec.dtype), spec.shape) for spec in self._specs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while (item := self._next()) is not None:
            yield item

    def _next(self) -> tuple[str, torch.Tensor] | None:
        with self._lock:
            if self.failure is not None:
                raise self.failure
            try:
                return next(self._tensors, None)
            except Exception as error:
                self.failure = error
                raise


Join = Callable[[str, int, int, int, _Weights], Any]
"""(host, port, size of the group, bytes of a buffer, weights) -> vLLM's sender, once all have joined."""


def join_vllm(host: str, port: int, size: int, buffer_bytes: int, weights: Any) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    place = {"rank": 0, "master_address": host, "master_port": port, "world_size": size}
    info = NCCLTrainerInitInfo(**place, **_PACKED, packed_buffer_size_bytes=buffer_bytes)
    return WeightTransferTrainerFactory.trainer_init(info, client=_OfReplicas(), source=weights)


class NativeSender(ChannelSender):
    """Implements `WeightSender`, for publishes without digests, by vLLM's own `TrainerWeightTransferEngine`: rank 0 of
    a group with all workers of all servers.

    vLLM's calls have no deadline: they run in a thread that is abandoned. A server that waits in NCCL then waits until
    it is restarted.
    """

    def __init__(
        self, bucket_bytes: int, num_receivers: int, *, device: str | torch.device, host: str, join: Join = join_vllm
    ) -> None:
        """`join`: forms the group; a test without GPUs takes another wire."""
        super().__init__("a publish by vLLM's own sender", bucket_bytes, num_receivers, "xxh3")
        self._device, self._host, self._join = _checked(device), host, join
        self._engine: Any = None
        self._begun = 0

    def open(self) -> CollectiveSource:
        self.close()
        return self._listen(f"tcp://{self._host}:*", CollectiveSource, store=self._host)

    def _abandon(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _send(self, channel: SenderChannel, values: tuple[int, ...], packer: Packer, deadline: Deadline) -> None:
        assert not packer.manifest.verify, "the recipe says weights.verify=off, since no receiver digests"
        weights, engine = _Weights(packer), self._engine
        if engine is None or set(values) != {self._begun}:
            self._abandon()
            engine = self._engine = self._form(channel, weights, deadline)
        else:
            channel.tell(Kind.BEGIN, self._begun)
        channel.wait_acked(0, deadline)  # every server has begun its update
        engine.source = weights
        try:
            wait_for(self._in_thread(engine.send_weights), deadline, "send the weights to vLLM", channel.watch)
        except WeightTransferError as error:
            raise weights.failure or error from None  # the trainer's own, which no receiver can cause
        finally:
            weights.end()
        channel.wait_acked(len(packer.manifest.buckets), deadline)

    def _form(self, channel: SenderChannel, weights: _Weights, deadline: Deadline) -> Any:
        """A group of all workers of all servers, whose number is the receivers' note."""
        with socket.create_server((self._host, 0)) as listener:  # vLLM binds the port itself
            port = listener.getsockname()[1]
        self._begun = ((self._begun >> 16) + 1) << 16 | port
        size = 1 + sum(map(int, channel.notes.values()))
        channel.tell(Kind.BEGIN, self._begun)
        forming = self._in_thread(lambda: self._join(self._host, port, size, self._bucket_bytes, weights))
        try:
            return wait_for(forming, deadline, f"form vLLM's group of {size} processes", channel.watch)
        except BaseException:
            forming.add_done_callback(lambda late: late.exception() or late.result().shutdown())
            raise

    def _in_thread(self, call: Callable[[], Any]) -> Future[Any]:
        device = torch.cuda.current_device() if self._device.type == "cuda" else None

        def here() -> Any:
            if device is not None:
                torch.cuda.set_device(device)
                torch.cuda.synchronize()  # vLLM reads on streams of its own
            return call()

        return in_thread(here, "vllm-sender")


Post = Callable[[str, Any, float], Future[Any]]
"""(path, body, seconds) -> the server's answer."""


class NativeReceiver(ChannelReceiver[CollectiveSource]):
    """Implements `WeightReceiver` for a server: makes its calls of an update. Nothing reaches the sink."""

    def __init__(self, source: CollectiveSource, num_workers: int, post: Post) -> None:
        """`num_workers`: of the server, and of every other."""
        super().__init__(source)
        self._num_workers, self._post = num_workers, post
        self._begun = 0
        """Of the group that the server's workers have joined; 0: none."""

    def _abandon(self) -> None:
        self._begun = 0

    def _receive(self, channel: ReceiverChannel, unpacker: Unpacker, deadline: Deadline) -> int:
        def call(path: str, **body: Any) -> None:
            what = f"have its server answer {path}"
            wait_for(self._post(path, body, deadline.remaining_s()), deadline, what, lambda: channel.check(what))

        manifest = unpacker.manifest
        begun = channel.join(manifest, deadline, self._begun, str(self._num_workers))
        if begun != self._begun:
            # An update that never ended keeps the server from leaving its last group.
            try:
                call("/shutdown_weight_transfer_engine")
            except WeightTransferError:
                call("/finish_weight_update")
                call("/shutdown_weight_transfer_engine")
            call("/init_weight_transfer_engine", init_info=self._place(begun & 0xFFFF))
            self._begun = begun
        call("/start_weight_update")
        channel.ack(0)
        told = [(spec.name, spec.dtype, spec.shape) for spec in manifest.tensors]
        columns = zip(("names", "dtype_names", "shapes"), zip(*told, strict=True), strict=True)
        call("/update_weights", update_info=dict(columns))
        call("/finish_weight_update")
        return len(manifest.buckets)

    def _place(self, port: int) -> dict[str, Any]:
        """The server's place in the group: its workers follow those of the receivers before it."""
        source, num_workers = self._source, self._num_workers
        place = {"rank_offset": 1 + source.receiver * num_workers, "world_size": 1 + source.num_receivers * num_workers}
        met = {"master_address": source.store, "master_port": port}
        return {**met, **place, **_PACKED, "packed_buffer_size_bytes": source.bucket_bytes}
