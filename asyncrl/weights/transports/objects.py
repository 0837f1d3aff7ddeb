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
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from asyncrl.errors import DeadlineExceeded, WeightTransferError, explain
from asyncrl.types import Bucket, DiskSource
from asyncrl.weights.object_store import REACHABLE, ObjectStore, in_thread
from asyncrl.weights.packing import Packer, Unpacker
from asyncrl.weights.transports.channel_ends import ChannelReceiver, ChannelSender
from asyncrl.weights.transports.control_channel import Deadline, Kind, ReceiverChannel, SenderChannel

logger = logging.getLogger(__name__)
T = TypeVar("T")

AT_ONCE = 4
"""Concurrent uploads of a sender or fetches of a receiver; equals the buckets held in memory."""
CLEAN_UP_S = 30.0
"""Longest wait for the store to delete objects."""
_LOOK_S = 0.02
_DIGEST = "xxh3"


class ObjectSender(ChannelSender):
    """Implements `WeightSender`."""

    def __init__(self, bucket_bytes: int, num_receivers: int, *, host: str, url: str) -> None:
        """
        Args:
            host: an address of this machine that receivers reach.
            url: where the objects are put.
        """
        super().__init__("a transfer over disk", bucket_bytes, num_receivers, _DIGEST)
        self._host, self._url = host, url.rstrip("/")
        self._store: ObjectStore | None = None
        self._name = ""
        self._attempts = 0
        self._cleaning: list[Future[None]] = []

    def open(self) -> DiskSource:
        """As `WeightSender.open`. Raises ConfigError: fsspec cannot serve the URL."""
        self.close()
        self._store = ObjectStore(self._url)
        self._name = f"asyncrl-weights-{os.getpid()}-{secrets.token_hex(8)}"
        self._buffers = (torch.empty(self._bucket_bytes, dtype=torch.uint8),)
        return self._listen(f"tcp://{self._host}:*", DiskSource, directory=f"{self._url}/{self._name}")

    def close(self) -> None:
        super().close()
        if self._store is not None:
            last = in_thread(partial(_clean_up, self._store, self._name, tuple(self._cleaning)))
            wait([last], timeout=2 * CLEAN_UP_S)
            self._store, self._cleaning = None, []

    def _send(self, channel: SenderChannel, values: tuple[int, ...], packer: Packer, deadline: Deadline) -> None:
        store, (buffer,) = self._store, self._buffers
        assert store is not None, "it is open"
        self._attempts += 1
        # An attempt has its own prefix, so late uploads of a failed one cannot mix with the next.
        place = f"{self._name}/{self._attempts}"
        uploads = deque[Future[None]]()
        buckets, told = packer.manifest.buckets, 0

        def tell_next() -> None:
            nonlocal told
            asked = f"put bucket {told} of {len(buckets)} below {self._url}"
            while True:
                channel.watch()
                if not deadline.remaining_s():
                    raise _late(asked, deadline)
                if wait(list(uploads)[:1], timeout=_LOOK_S).done:
                    break
            _outcome(uploads.popleft(), asked)
            channel.tell(Kind.BUCKET, told)
            told += 1

        try:
            channel.tell(Kind.BEGIN, self._attempts)
            for bucket in buckets:
                if len(uploads) == AT_ONCE:
                    tell_next()
                packer.pack(bucket, buffer)
                data = buffer[: bucket.nbytes].numpy().tobytes()
                uploads.append(in_thread(partial(store.put, f"{place}/{bucket.index}", data)))
            # All buckets are packed; announce the last uploads in order.
            while uploads:
                tell_next()
            channel.wait_acked(len(buckets), deadline)
        finally:
            self._cleaning = [cleaning for cleaning in self._cleaning if not cleaning.done()]
            self._cleaning.append(in_thread(partial(_clean_up, store, place, tuple(uploads))))


class ObjectReceiver(ChannelReceiver[DiskSource]):
    """Implements `WeightReceiver`."""

    def __init__(self, source: DiskSource) -> None:
        super().__init__(source)
        self._store: ObjectStore | None = None

    def _attach(self) -> None:
        """Raises ConfigError: fsspec cannot serve the URL here."""
        self._store = ObjectStore(self._source.directory)
        self._buffers = (torch.empty(self._source.bucket_bytes, dtype=torch.uint8),)

    def _receive(self, channel: ReceiverChannel, unpacker: Unpacker, deadline: Deadline) -> int:
        """Fetches announced buckets concurrently and applies them in order."""
        store = self._store
        assert store is not None, "a receiver attaches first"
        manifest, buckets = unpacker.manifest, unpacker.manifest.buckets
        attempt = channel.join(manifest, deadline)
        fetches: deque[Future[bytes]] = deque()
        told = begun = applied = 0
        while applied < len(buckets):
            # Phase 1: start fetches of announced buckets, at most AT_ONCE.
            while begun < told and len(fetches) < AT_ONCE:
                fetches.append(in_thread(partial(store.get, f"{attempt}/{buckets[begun].index}")))
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
        return len(buckets)

    def _apply(self, unpacker: Unpacker, bucket: Bucket, data: bytes, what: str) -> None:
        if len(data) != bucket.nbytes:
            raise WeightTransferError(explain(what, f"{len(data)} bytes instead of {bucket.nbytes}", REACHABLE))
        (buffer,) = self._buffers
        buffer[: bucket.nbytes].numpy()[:] = np.frombuffer(data, np.uint8)
        unpacker.unpack(bucket, buffer)


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
