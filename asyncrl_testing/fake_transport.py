"""A weight transport inside one process: receivers are threads, buckets are tensors handed over by queues."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from asyncrl.errors import DeadlineExceeded, TransferEnded, WeightTransferError, explain
from asyncrl.types import Bucket, Digest, Manifest, TransferSource
from asyncrl.weights.packing import Packer, Unpacker
from asyncrl.weights.plan import check_fits
from asyncrl.weights.transport import WeightSink
from asyncrl.weights.transports.control_channel import Deadline, layout_of
from asyncrl.weights.transports.interruptible_sender import InterruptibleSender

_POLL_S = 0.02


@dataclass(eq=False)
class _Attempt:
    """One call of `receive`. The inbox carries the buckets, then None for the end; either side may set `failure`."""

    receiver: int
    layout: str
    inbox: queue.Queue[tuple[Bucket, torch.Tensor] | None] = field(default_factory=lambda: queue.Queue(maxsize=2))
    has_all: bool = False
    failure: str | None = None
    ended_by_sender: bool = False


class FakeNetwork:
    """Connects the senders and receivers of one test: a `TransferSource` carries no reference to its sender."""

    def __init__(self) -> None:
        self._hubs: dict[str, _Hub] = {}
        self._epochs = itertools.count(1)

    def sender(self, bucket_bytes: int, num_receivers: int) -> InterruptibleSender:
        return InterruptibleSender(FakeSender(self, bucket_bytes, num_receivers))

    def receiver(self, source: TransferSource) -> FakeReceiver:
        return FakeReceiver(self, source)

    def open_hub(self) -> tuple[int, _Hub]:
        epoch = next(self._epochs)
        hub = self._hubs[f"fake-{epoch}"] = _Hub()
        return epoch, hub

    def hub(self, address: str) -> _Hub:
        return self._hubs[address]


class _Hub:
    """State shared by a sender and its receivers, guarded by `changed`. `waiting`: attempts not yet in a transfer, by
    (publish_id, receiver). `publish_id`: the sender's newest."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: dict[tuple[int, int], _Attempt] = {}
        self.closed = False
        self.publish_id = 0

    def fail(self, attempt: _Attempt, text: str, *, at_sender: bool = False) -> None:
        with self.changed:
            if attempt.failure is None:
                attempt.failure, attempt.ended_by_sender = text, at_sender
            self.changed.notify_all()

    def passed(self) -> str:
        """The error for a receiver of an older publish."""
        return f"the sender ended it: the sender is at publish {self.publish_id}"

    def require_open(self) -> None:
        """Raises WeightTransferError if the sender was closed."""
        if self.closed:
            raise WeightTransferError(explain("send weights", "the sender was closed meanwhile", "open() it again"))


class FakeSender:
    """Implements `WeightSender`. One thread at a time, except for `interrupt`."""

    def __init__(self, network: FakeNetwork, bucket_bytes: int, num_receivers: int) -> None:
        self._network = network
        self._bucket_bytes = bucket_bytes
        self._num_receivers = num_receivers
        self._hub: _Hub | None = None

    def open(self) -> TransferSource:
        self.close()
        epoch, self._hub = self._network.open_hub()
        return TransferSource(
            endpoint=f"fake-{epoch}", bucket_bytes=self._bucket_bytes, num_receivers=self._num_receivers, epoch=epoch
        )

    def send(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        if self._hub is None:
            raise WeightTransferError(explain("send weights", "the sender is closed", "call open() first"))
        check_fits(manifest, self._bucket_bytes)
        hub, deadline = self._hub, Deadline(timeout_s)
        packer = Packer(manifest, weights)
        attempts = self._gather(hub, manifest, deadline)
        try:
            for attempt in attempts:
                if attempt.layout != layout_of(manifest):
                    found = f"receiver {attempt.receiver} expects {attempt.layout}"
                    raise WeightTransferError(explain(f"send {layout_of(manifest)}", found, "use one manifest"))
            for bucket in manifest.buckets:
                data = torch.empty(bucket.nbytes, dtype=torch.uint8)
                # One tensor per bucket serves all receivers, which only read it.
                packer.pack(bucket, data)
                for attempt in attempts:
                    _put(attempt, (bucket, data), deadline, hub)
            # Wait for all receivers before the end mark: a publish counts for all of them or for none.
            digest = packer.finish()
            with hub.changed:
                hub.changed.wait_for(
                    lambda: hub.closed or all(a.has_all or a.failure for a in attempts), deadline.remaining_s()
                )
                hub.require_open()
            for attempt in attempts:
                _raise_failure(attempt)
            if late := [attempt.receiver for attempt in attempts if not attempt.has_all]:
                raise _late(late, "take the last bucket", deadline)
            for attempt in attempts:
                _put(attempt, None, deadline, hub)
        except BaseException as error:
            for attempt in attempts:
                hub.fail(attempt, f"the sender ended it: {type(error).__name__}: {error}", at_sender=True)
            raise
        return digest

    def interrupt(self) -> None:
        """As `WeightSender.interrupt`."""
        if (hub := self._hub) is not None:
            with hub.changed:
                hub.closed = True
                hub.changed.notify_all()

    def close(self) -> None:
        if self._hub is None:
            return
        self.interrupt()
        for attempt in list(self._hub.waiting.values()):
            self._hub.fail(attempt, "the sender is gone", at_sender=True)
        self._hub = None

    def _gather(self, hub: _Hub, manifest: Manifest, deadline: Deadline) -> list[_Attempt]:
        """Takes the attempts of all receivers out of `waiting`."""
        keys = [(manifest.publish_id, r) for r in range(self._num_receivers)]
        with hub.changed:
            hub.publish_id = manifest.publish_id
            for key in [key for key in hub.waiting if key[0] < manifest.publish_id]:
                hub.fail(hub.waiting.pop(key), hub.passed(), at_sender=True)
            hub.changed.wait_for(lambda: hub.closed or all(key in hub.waiting for key in keys), deadline.remaining_s())
            hub.require_open()
            late = [key[1] for key in keys if key not in hub.waiting]
            attempts = [attempt for key in keys if (attempt := hub.waiting.pop(key, None)) is not None]
        if late:
            error = _late(late, f"join publish {manifest.publish_id}", deadline)
            for attempt in attempts:
                hub.fail(attempt, f"the sender ended it: {error}", at_sender=True)
            raise error
        return attempts


class FakeReceiver:
    """Implements `WeightReceiver`."""

    def __init__(self, network: FakeNetwork, source: TransferSource) -> None:
        self._hub = network.hub(source.endpoint)
        self._source = source

    def receive(self, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        check_fits(manifest, self._source.bucket_bytes)
        hub, deadline = self._hub, Deadline(timeout_s)
        key = (manifest.publish_id, self._source.receiver)
        attempt = _Attempt(self._source.receiver, layout_of(manifest))
        unpacker = Unpacker(manifest, sink)
        with hub.changed:
            # The attempt may be over before it begins; its inbox then reports why.
            if hub.closed:
                attempt.failure, attempt.ended_by_sender = "the sender is gone", True
            elif manifest.publish_id < hub.publish_id:
                attempt.failure, attempt.ended_by_sender = hub.passed(), True
            hub.waiting[key] = attempt
            hub.changed.notify_all()
        try:
            for _ in manifest.buckets:
                item = _get(attempt, deadline)
                assert item is not None, "a transfer ended before its last bucket"
                unpacker.unpack(*item)
            digest = unpacker.finish()
            with hub.changed:
                attempt.has_all = True
                hub.changed.notify_all()
            _get(attempt, deadline)
        except Exception as error:
            with hub.changed:
                if hub.waiting.get(key) is attempt:
                    del hub.waiting[key]
            hub.fail(attempt, f"{type(error).__name__}: {error}")
            raise
        return digest

    def close(self) -> None:
        """Holds nothing."""


def _put(attempt: _Attempt, item: tuple[Bucket, torch.Tensor] | None, deadline: Deadline, hub: _Hub) -> None:
    while True:
        _raise_failure(attempt)
        hub.require_open()
        try:
            return attempt.inbox.put(item, timeout=min(deadline.remaining_s(), _POLL_S))
        except queue.Full:
            if not deadline.remaining_s():
                raise _late([attempt.receiver], "take a bucket", deadline) from None


def _get(attempt: _Attempt, deadline: Deadline) -> tuple[Bucket, torch.Tensor] | None:
    while True:
        _raise_failure(attempt)
        try:
            return attempt.inbox.get(timeout=min(deadline.remaining_s(), _POLL_S))
        except queue.Empty:
            if not deadline.remaining_s():
                raise _late([attempt.receiver], "get a bucket", deadline) from None


def _raise_failure(attempt: _Attempt) -> None:
    if attempt.failure is not None:
        asked = f"receiver {attempt.receiver} to take the weights"
        kind = TransferEnded if attempt.ended_by_sender else WeightTransferError
        raise kind(explain(asked, attempt.failure, "publish again"))


def _late(receivers: list[int], what: str, deadline: Deadline) -> DeadlineExceeded:
    names = ", ".join(f"receiver {r}" for r in receivers)
    return DeadlineExceeded(explain(f"{what} within {deadline.timeout_s:.1f} s", f"not done by {names}", "see its log"))
