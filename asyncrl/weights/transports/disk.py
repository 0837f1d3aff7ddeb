"""Sends weights through a file system that all sides share: one directory per publish, in Hugging Face's layout.

The slowest transport with the fewest requirements: files, and a TCP connection for control messages. The newest
complete publish stays until the next one or the sender's exit. With encoding full, `from_pretrained` can load it
together with the model's config.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from contextlib import closing
from pathlib import Path

import torch

from asyncrl.errors import ConfigError, DeadlineExceeded, WeightTransferError, explain
from asyncrl.json_records import sync
from asyncrl.types import DiskSource, Manifest
from asyncrl.weights.lock_files import create_locked, publish_lock, remove_stale_publishes
from asyncrl.weights.packing import Packer, Unpacker
from asyncrl.weights.transports.channel_ends import ChannelReceiver, ChannelSender
from asyncrl.weights.transports.control_channel import Deadline, Kind, ReceiverChannel, SenderChannel
from asyncrl.weights.transports.shards import ShardReader, ShardWriter, plan_shards, writing

logger = logging.getLogger(__name__)

_DIGEST = "xxh3"
"""Both sides compute digests in host memory."""


class PublishDirectory:
    """A sender's own directory below `root`, with the newest complete publish as `publish-<id>`.

    A lock file with its name shows that the owner is alive (`weights/lock_files.py`). Leftovers of dead owners on this
    machine are removed; other machines' leftovers stay, because their locks may not be visible here.
    """

    def __init__(self, root: Path) -> None:
        """Raises ConfigError: `root` cannot be written, or its file system has no locks."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_stale_publishes(root)
            self._fd, self._lock = create_locked(root, *publish_lock())
            self.path = self._lock.with_suffix("")
            try:
                self.path.mkdir(mode=0o700)
            except OSError:
                self.close()
                raise
        except OSError as error:
            do = "set weights.disk_directory to a directory that can be written and locked"
            raise ConfigError(explain(f"a directory for weights below {root}", str(error), do)) from error

    def begin(self, publish_id: int) -> Path:
        """A new directory for an incomplete publish. Raises WeightTransferError."""
        path = self._incomplete(publish_id)
        with writing(path):
            path.mkdir(mode=0o700)
        return path

    def complete(self, publish_id: int) -> None:
        """Renames it to `publish-<id>` and removes the publishes before it. Raises WeightTransferError."""
        final = self.publish(publish_id)
        shutil.rmtree(final, ignore_errors=True)  # the same publish, sent again
        with writing(final):
            os.rename(self._incomplete(publish_id), final)
            sync(self.path)
        for path in self.path.iterdir():
            if path != final:
                shutil.rmtree(path, ignore_errors=True)

    def discard(self, publish_id: int) -> None:
        """Removes it if it is incomplete."""
        shutil.rmtree(self._incomplete(publish_id), ignore_errors=True)

    def publish(self, publish_id: int) -> Path:
        return self.path / f"publish-{publish_id}"

    def close(self) -> None:
        """Removes everything. Idempotent."""
        if self._fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def _incomplete(self, publish_id: int) -> Path:
        return self.path / f".publish-{publish_id}"


class DiskSender(ChannelSender):
    """Implements `WeightSender`."""

    def __init__(self, bucket_bytes: int, num_receivers: int, *, host: str = "127.0.0.1", directory: str = "") -> None:
        """
        Args:
            host: an address of this machine that receivers reach.
            directory: where publishes are written, at the same path for all receivers; "": the temporary directory, for
                receivers on this machine only.
        """
        super().__init__("a transfer over disk", bucket_bytes, num_receivers, _DIGEST)
        self._host = host
        self._root = Path(directory or tempfile.gettempdir()).absolute()
        self._directory: PublishDirectory | None = None

    def open(self) -> DiskSource:
        """As `WeightSender.open`. Raises ConfigError: the directory cannot be used."""
        self.close()
        try:
            self._directory = PublishDirectory(self._root)
            self._buffers = (torch.empty(self._bucket_bytes, dtype=torch.uint8),)
            return self._listen(f"tcp://{self._host}:*", DiskSource, directory=str(self._directory.path))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def _send(self, channel: SenderChannel, values: tuple[int, ...], packer: Packer, deadline: Deadline) -> None:
        """The receivers hear of the buckets once the publish is complete under its final name; removes it on an
        error."""
        directory = self._directory
        assert directory is not None, "it is open"
        channel.tell(Kind.BEGIN)
        manifest, (buffer,), writer = packer.manifest, self._buffers, None
        try:
            path = directory.begin(manifest.publish_id)
            writer = ShardWriter(path, plan_shards(manifest.tensors))
            for bucket in manifest.buckets:
                channel.check()
                if not deadline.remaining_s():
                    asked = f"write publish {manifest.publish_id} to {path} within {deadline.timeout_s:.1f} s"
                    found = f"{bucket.index} of {len(manifest.buckets)} buckets are written"
                    do = "raise weights.transfer_timeout_s, or set weights.disk_directory to a faster disk"
                    raise DeadlineExceeded(explain(asked, found, do))
                packer.pack(bucket, buffer)
                for piece in bucket.slices:
                    end = piece.bucket_offset + piece.nbytes
                    writer.write(piece.tensor, piece.offset, buffer[piece.bucket_offset : end])
            # All files are synced before the rename: a publish under its final name is always whole.
            packer.finish()
            writer.finish()
            directory.complete(manifest.publish_id)
        finally:
            if writer is not None:
                writer.close()
            directory.discard(manifest.publish_id)
        channel.tell(Kind.BUCKET, len(manifest.buckets) - 1)
        channel.wait_acked(len(manifest.buckets), deadline)


class DiskReceiver(ChannelReceiver[DiskSource]):
    """Implements `WeightReceiver`."""

    def _attach(self) -> None:
        self._buffers = (torch.empty(self._source.bucket_bytes, dtype=torch.uint8),)

    def _receive(self, channel: ReceiverChannel, unpacker: Unpacker, deadline: Deadline) -> int:
        manifest, (buffer,) = unpacker.manifest, self._buffers
        channel.join(manifest, deadline)
        with closing(ShardReader(self._directory(manifest), plan_shards(manifest.tensors))) as reader:
            what = f"see publish {manifest.publish_id} on disk"
            channel.expect(Kind.BUCKET, len(manifest.buckets) - 1, deadline, what)
            for bucket in manifest.buckets:
                what = f"read bucket {bucket.index} of {len(manifest.buckets)}"
                channel.check(what)
                if not deadline.remaining_s():
                    asked = f"receiver {self._source.receiver} to {what} within {deadline.timeout_s:.1f} s"
                    found, do = "its disk or its sink is slow", "raise weights.transfer_timeout_s"
                    raise DeadlineExceeded(explain(asked, found, do))
                for piece in bucket.slices:
                    end = piece.bucket_offset + piece.nbytes
                    reader.read(piece.tensor, piece.offset, buffer[piece.bucket_offset : end])
                unpacker.unpack(bucket, buffer)
                channel.ack(bucket.index)
        return len(manifest.buckets)

    def _directory(self, manifest: Manifest) -> Path:
        """Path of the publish, before it exists. Raises WeightTransferError: the sender's directory is not visible
        here."""
        directory = Path(self._source.directory)
        if not directory.is_dir():
            do = "set weights.disk_directory to a directory that the trainer and all replicas see under one path"
            found = f"no such directory on {socket.gethostname()}"
            raise WeightTransferError(explain(f"read weights from {directory}", found, do))
        return directory / f"publish-{manifest.publish_id}"
