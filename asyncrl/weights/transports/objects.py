"""Sends weights through object storage: an object for each bucket below a URL that fsspec knows (s3://, gs://, az://).

For fleets that share no file system with the trainer; control messages still need a TCP connection. `AT_ONCE` objects
are uploaded or fetched concurrently, because one connection to an object store is slow, and receivers fetch the first
objects while later ones are uploaded. The objects of a publish are deleted at its end. Objects of a killed sender stay:
configure the storage bucket to expire old objects.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from asyncrl.errors import ConfigError, DeadlineExceeded, WeightTransferError, explain
from asyncrl.types import Bucket, Digest, DiskSource, Manifest
from asyncrl.weights.object_store import REACHABLE, ObjectStore, in_thread
from asyncrl.weights.packing import Packer, Unpacker
from asyncrl.weights.plan import check_fits
from asyncrl.weights.transport import WeightSink
from asyncrl.weights.transports.control_channel import Deadline, Kind, ReceiverChannel, SenderChannel

logger = logging.getLogger(__name__)
T = TypeVar("T")

AT_ONCE = 4
"""Concurrent uploads of a sender or fetches of a receiver; equals the buckets held in memory."""
CLEAN_UP_S = 30.0
"""Longest wait for the store to delete objects."""
_LOOK_S = 0.02
_DIGEST = "xxh3"


class ObjectSender:
    """Implements `WeightSender`. One thread at a time, except for `interrupt`."""

    def __init__(self, bucket_bytes: int, num_receivers: int, *, host: str, url: str) -> None:
        """
        Args:
            host: an address of this machine that receivers reach.
            url: where the objects are put.
        """
        if num_receivers < 1:
            raise ConfigError(explain("a transfer over disk", f"{num_receivers} receivers", "use at least 1"))
        self._bucket_bytes, self._num_receivers = bucket_bytes, num_receivers
        self._host, self._url = host, url.rstrip("/")
        self._channel: SenderChannel | None = None
        self._store: ObjectStore | None = None
        self._name = ""
        self._attempts = 0
        self._cleaning: list[Future[None]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def open(self) -> DiskSource:
        """As `WeightSender.open`. Raises ConfigError: fsspec cannot serve the URL."""
        self.close()
        self._store = ObjectStore(self._url)
        self._name = f"asyncrl-weights-{os.getpid()}-{secrets.token_hex(8)}"
        self._channel = SenderChannel(f"tcp://{self._host}:*", self._num_receivers)
        self._buffer = torch.empty(self._bucket_bytes, dtype=torch.uint8)
        return DiskSource(
            endpoint=self._channel.endpoint,
            directory=f"{self._url}/{self._name}",
            bucket_bytes=self._bucket_bytes,
            num_receivers=self._num_receivers,
            epoch=secrets.randbits(63),
            key=self._channel.key,
            digest=_DIGEST,
        )

    def send(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        if self._store is None or self._channel is None:
            raise WeightTransferError(explain("send weights", "the sender is closed", "call open() first"))
        check_fits(manifest, self._bucket_bytes)
        channel, deadline = self._channel, Deadline(timeout_s)
        self._attempts += 1
        place = f"{self._name}/{self._attempts}"
        # An attempt has its own prefix, so late uploads of a failed one cannot mix with the next.
        uploads: deque[Future[None]] = deque()
        try:
            channel.gather(manifest, deadline)
            channel.tell(Kind.BEGIN, self._attempts)
            digest = self._upload(manifest, weights, deadline, partial(self._put, place), uploads)
            channel.wait_acked(len(manifest.buckets), deadline)
            channel.finish()
        except BaseException as error:
            channel.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._cleaning = [cleaning for cleaning in self._cleaning if not cleaning.done()]
            self._cleaning.append(in_thread(partial(_clean_up, self._store, place, tuple(uploads))))
        return digest

    def interrupt(self) -> None:
        """As `Interruptible.interrupt`."""
        if (channel := self._channel) is not None:
            channel.interrupt()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._store is not None:
            last = in_thread(partial(_clean_up, self._store, self._name, tuple(self._cleaning)))
            wait([last], timeout=2 * CLEAN_UP_S)
            self._store, self._cleaning = None, []
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _upload(
        self,
        manifest: Manifest,
        weights: Iterable[tuple[str, torch.Tensor]],
        deadline: Deadline,
        put: Callable[[int, bytes], None],
        uploads: deque[Future[None]],
    ) -> Digest | None:
        """Returns once all buckets are in the store and announced to the receivers. `uploads`: in progress."""
        packer, told, channel = Packer(manifest, weights, _DIGEST), 0, self._channel
        assert channel is not None, "it is open"

        def tell_next() -> None:
            nonlocal told
            asked = f"put bucket {told} of {len(manifest.buckets)} below {self._url}"
            while True:
                channel.watch()
                if not deadline.remaining_s():
                    raise _late(asked, deadline)
                if wait(list(uploads)[:1], timeout=_LOOK_S).done:
                    break
            _outcome(uploads.popleft(), asked)
            channel.tell(Kind.BUCKET, told)
            told += 1

        for bucket in manifest.buckets:
            if len(uploads) == AT_ONCE:
                tell_next()
            packer.pack(bucket, self._buffer)
            data = self._buffer[: bucket.nbytes].numpy().tobytes()
            uploads.append(in_thread(partial(put, bucket.index, data)))
        digest = packer.finish()
        # All buckets are packed; announce the last uploads in order.
        while uploads:
            tell_next()
        return digest

    def _put(self, place: str, bucket: int, data: bytes) -> None:
        assert self._store is not None
        self._store.put(f"{place}/{bucket}", data)


class ObjectReceiver:
    """Implements `WeightReceiver`."""

    def __init__(self, source: DiskSource) -> None:
        self._source = source
        self._channel: ReceiverChannel | None = None
        self._store: ObjectStore | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def receive(self, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        """As `WeightReceiver.receive`. Raises ConfigError too: fsspec cannot serve the URL here."""
        if self._channel is None or self._store is None:
            self._store = ObjectStore(self._source.directory)
            self._channel = ReceiverChannel(self._source.endpoint, self._source.receiver, self._source.key)
            self._buffer = torch.empty(self._source.bucket_bytes, dtype=torch.uint8)
        channel, deadline = self._channel, Deadline(timeout_s)
        try:
            check_fits(manifest, self._source.bucket_bytes)
            channel.join(manifest)
            what = f"begin publish {manifest.publish_id}"
            attempt = channel.expect(Kind.BEGIN, None, deadline, what).value
            digest = self._fetch(channel, manifest, sink, deadline, partial(self._get, self._store, attempt))
            channel.ack(len(manifest.buckets))
            channel.expect(Kind.DONE, 0, deadline, f"end publish {manifest.publish_id}")
        except BaseException as error:
            channel.fail(error)
            raise
        return digest

    def close(self) -> None:
        """Idempotent; a later `receive` joins again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def _get(store: ObjectStore, attempt: int, bucket: Bucket) -> bytes:
        return store.get(f"{attempt}/{bucket.index}")

    def _fetch(
        self,
        channel: ReceiverChannel,
        manifest: Manifest,
        sink: WeightSink,
        deadline: Deadline,
        get: Callable[[Bucket], bytes],
    ) -> Digest | None:
        """Fetches announced buckets concurrently and applies them in order."""
        unpacker, buckets = Unpacker(manifest, sink, self._source.digest), manifest.buckets
        fetches: deque[Future[bytes]] = deque()
        told = begun = applied = 0
        while applied < len(buckets):
            # Phase 1: start fetches of announced buckets, at most AT_ONCE.
            while begun < told and len(fetches) < AT_ONCE:
                fetches.append(in_thread(partial(get, buckets[begun])))
                begun += 1
            # Phase 2: apply the oldest finished fetch, or wait for the next announcement.
            bucket = buckets[applied]
            what = f"fetch bucket {bucket.index} of {len(buckets)} from {self._source.directory}"
            if fetches and fetches[0].done():
                fetch = fetches.popleft()
                while fetch.exception() is not None and channel.poll(_LOOK_S, what) is not None:
                    pass  # `poll` raises if the sender ended the publish: a better error than the missing object
                self._apply(unpacker, bucket, _outcome(fetch, what), what)
                channel.ack(bucket.index)
                applied += 1
            elif (message := channel.poll(_LOOK_S, what)) is not None:
                channel.require(message, Kind.BUCKET, told, what)
                told += 1
            elif not deadline.remaining_s():
                raise _late(f"receiver {self._source.receiver} to {what}", deadline)
        return unpacker.finish()

    def _apply(self, unpacker: Unpacker, bucket: Bucket, data: bytes, what: str) -> None:
        if len(data) != bucket.nbytes:
            raise WeightTransferError(explain(what, f"{len(data)} bytes instead of {bucket.nbytes}", REACHABLE))
        self._buffer[: bucket.nbytes].numpy()[:] = np.frombuffer(data, np.uint8)
        unpacker.unpack(bucket, self._buffer)


def _outcome(done: Future[T], asked: str) -> T:
    try:
        return done.result()
    except Exception as error:
        raise WeightTransferError(explain(asked, f"{type(error).__name__}: {error}", REACHABLE)) from error


def _late(asked: str, deadline: Deadline) -> DeadlineExceeded:
    do = "raise weights.transfer_timeout_s; weights.encoding=delta sends less"
    return DeadlineExceeded(explain(f"{asked} within {deadline.timeout_s:.1f} s", "the store has not answered", do))


def _clean_up(store: ObjectStore, name: str, first: tuple[Future[None], ...]) -> None:
    """Deletes the objects below `name` once `first` has ended."""
    wait(first, timeout=CLEAN_UP_S)
    try:
        store.remove(name)
    except Exception as error:  # noqa: BLE001 - nothing of the run depends on it
        logger.warning("objects below %s stay: %s: %s", name, type(error).__name__, error)
