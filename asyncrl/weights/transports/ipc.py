"""Sends weights to receivers on the same machine: a ring of slots that every receiver reads in place.

The sender writes each bucket once for all receivers. With two or more slots it fills one while receivers read another;
a slot is reused only after every receiver has acknowledged it. Small slots are faster: a bucket of a few MiB is still
in the CPU's cache when the receivers read it.

The ring is in shared memory. A sender of GPU tensors also offers a ring in GPU memory (`media.py`), which a publish
uses if every receiver has mapped it. Otherwise the shared memory is pinned at both ends: a bucket is packed in the
GPU's ring and copied to shared memory while the next is packed.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
from collections.abc import Callable, Sequence

import torch

from asyncrl.errors import TransferEnded, WeightTransferError, explain
from asyncrl.types import IpcSource
from asyncrl.weights.digest import digest_for
from asyncrl.weights.packing import Packer, Unpacker
from asyncrl.weights.transports.channel_ends import ChannelReceiver, ChannelSender
from asyncrl.weights.transports.control_channel import Deadline, Kind, ReceiverChannel, SenderChannel
from asyncrl.weights.transports.media import (
    CudaMapping,
    CudaMedium,
    HostMapping,
    Mapping,
    Medium,
    OpenMedium,
    Stage,
)
from asyncrl.weights.transports.shared_segment import SharedSegment, attach

logger = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_NUM_SLOTS = 2
"""Buckets that can be in transfer concurrently: the memory is this multiple of a bucket."""
_PROOF_BYTES = 16
_SHARED, _DEVICE = 0, 1
"""Values of READY (the best medium that a receiver can read) and BEGIN (the medium that the publish uses)."""

MakeMedium = Callable[[int], Medium]
MakeStage = Callable[[Sequence[torch.Tensor]], Stage]


class IpcSender(ChannelSender):
    """Implements `WeightSender`."""

    def __init__(
        self,
        bucket_bytes: int,
        num_receivers: int,
        *,
        device: str | torch.device = "cpu",
        make_medium: MakeMedium | None = None,
        make_stage: MakeStage = Stage,
    ) -> None:
        """
        Args:
            device: where the weights live.
            make_medium: allocates device memory of the given size; default: on `device`, if it is a GPU.
            make_stage: makes the copier from device memory to shared memory.
        """
        self._device = torch.device(device)
        super().__init__("an ipc transfer", bucket_bytes, num_receivers, digest_for(self._device))
        self._ring_bytes = _slot_bytes(bucket_bytes) * _NUM_SLOTS
        self._make_medium = make_medium
        if make_medium is None and self._device.type == "cuda":
            self._make_medium = lambda nbytes: CudaMedium.take(nbytes, self._device)
        self._make_stage = make_stage
        self._segment: SharedSegment | None = None
        self._shared: HostMapping | None = None
        self._medium: Medium | None = None
        self._stage: Stage | None = None
        self._warned = False

    def open(self) -> IpcSource:
        """As `WeightSender.open`. Raises ConfigError: there is not enough shared memory."""
        self.close()
        try:
            self._segment = SharedSegment()
            proof = self._make_ring(self._segment)
            source = self._listen(
                f"ipc://{self._segment.socket_path}",
                IpcSource,
                path=str(self._segment.path),
                host=platform.node(),
                device_memory="" if self._medium is None else self._medium.describe(),
                proof=proof,
            )
            os.chmod(self._segment.socket_path, 0o600)
        except BaseException:
            self.close()
            raise
        return source

    def close(self) -> None:
        super().close()
        self._stage = None
        for mapping in (self._medium, self._shared):
            if mapping is not None:
                mapping.close()
        self._medium = self._shared = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _send(self, channel: SenderChannel, values: tuple[int, ...], packer: Packer, deadline: Deadline) -> None:
        assert self._segment is not None, "it is open"
        buckets = packer.manifest.buckets
        kind, medium = self._choose(values, channel.notes, self._segment)
        stage = self._stage if kind == _SHARED else None
        slots = _slots(medium.data[: self._ring_bytes], self._bucket_bytes)
        channel.tell(Kind.BEGIN, kind)
        if stage is not None and buckets and packer.device_of(buckets[0]) == stage.place.device:
            _send_staged(packer, stage, slots, channel, deadline)
        else:
            # A slot is free once every receiver has acknowledged its previous bucket.
            for bucket in buckets:
                channel.wait_acked(bucket.index - len(slots), deadline)
                packer.pack(bucket, slots[bucket.index % len(slots)])
                medium.synchronize()
                channel.tell(Kind.BUCKET, bucket.index)
        channel.wait_acked(len(buckets), deadline)

    def _make_ring(self, segment: SharedSegment) -> bytes:
        """Makes the ring in device memory and returns its proof; without device memory, makes it in shared memory and
        returns b"". With a device ring, shared memory is reserved only once a publish needs it."""
        if self._make_medium is not None:
            try:
                self._medium = self._make_medium(self._ring_bytes + _PROOF_BYTES)
            except WeightTransferError as error:
                self._warn(str(error))
            else:
                buffers = _slots(self._medium.data[: self._ring_bytes], self._bucket_bytes)
                self._stage = self._make_stage(buffers)
                proof = secrets.token_bytes(_PROOF_BYTES)
                self._medium.data[self._ring_bytes :].copy_(torch.frombuffer(bytearray(proof), dtype=torch.uint8))
                self._medium.synchronize()
                return proof
        segment.reserve(self._ring_bytes)
        return b""

    def _choose(self, values: tuple[int, ...], notes: dict[int, str], segment: SharedSegment) -> tuple[int, Mapping]:
        """Device memory if all receivers have mapped it, else shared memory for all."""
        if self._medium is not None and all(value == _DEVICE for value in values):
            return _DEVICE, self._medium
        if self._medium is not None:
            self._warn("; ".join(f"receiver {receiver}: {note}" for receiver, note in notes.items()))
            segment.reserve(self._ring_bytes)
        if self._shared is None:
            self._shared = HostMapping(segment.data, self._device)
        return _SHARED, self._shared

    def _warn(self, reason: str) -> None:
        if not self._warned:
            logger.warning("weights go through shared memory, not from GPU to GPU: %s", reason)
        self._warned = True


class IpcReceiver(ChannelReceiver[IpcSource]):
    """Implements `WeightReceiver`. The sink reads views of the ring itself, without a copy. Only a bucket on another
    device than the sink's is first copied there whole, unless the host digests it: the sender can then reuse the slot,
    and digests and sinks do not use the sender's GPU."""

    def __init__(
        self,
        source: IpcSource,
        *,
        device: str | torch.device = "cpu",
        open_medium: OpenMedium = CudaMapping,
    ) -> None:
        """`device`: where the sink's tensors live. `open_medium`: maps the device memory that a sender offers."""
        super().__init__(source)
        self._device = torch.device(device)
        self._open_medium = open_medium
        self._shared: HostMapping | None = None
        self._mapped: Mapping | None = None
        self._note = ""

    def _receive(self, channel: ReceiverChannel, unpacker: Unpacker, deadline: Deadline) -> int:
        manifest = unpacker.manifest
        kind = channel.join(manifest, deadline, _SHARED if self._mapped is None else _DEVICE, self._note)
        medium = self._medium(kind)
        ring_bytes = medium.data.numel() - (_PROOF_BYTES if kind == _DEVICE else 0)
        slots = _slots(medium.data[:ring_bytes], self._source.bucket_bytes)
        # Differences and kept weights need host memory, as does a digest that the host computes.
        is_direct = self._source.digest == "words" and manifest.encoding != "delta" and not manifest.is_kept
        device = self._device if is_direct else medium.data.device
        for bucket in manifest.buckets:
            what = f"read bucket {bucket.index} of {len(manifest.buckets)}"
            channel.expect(Kind.BUCKET, bucket.index, deadline, what)
            slot = slots[bucket.index % len(slots)][: bucket.nbytes]
            own = slot.to(device, non_blocking=True)  # the slot itself if already on that device
            # Read in place before the ACK frees the slot; a copy is read after it, so the sender need not wait.
            if own is slot:
                unpacker.unpack(bucket, slot)
            medium.synchronize()
            channel.ack(bucket.index)
            if own is not slot:
                unpacker.unpack(bucket, own)
            del own
        return len(manifest.buckets)

    def close(self) -> None:
        super().close()
        for mapping in (self._mapped, self._shared):
            if mapping is not None:
                mapping.close()
        self._mapped = self._shared = None

    def _attach(self) -> None:
        """Raises TransferEnded: the sender died. WeightTransferError: it is on another machine."""
        try:
            self._shared = HostMapping(attach(self._source.path), self._device)
        except TransferEnded as error:
            if self._source.host == platform.node():
                raise
            found = f"the trainer is on {self._source.host}, this replica on {platform.node()}"
            do = "set weights.transport=collective: ipc serves one machine"
            raise WeightTransferError(explain("receive weights by ipc", found, do)) from error
        # A failed mapping is not an error: READY carries the reason, and the publish uses shared memory.
        if self._source.device_memory:
            try:
                self._mapped, self._note = self._map_device(), ""
            except WeightTransferError as error:
                self._note = " ".join(str(error).split())

    def _map_device(self) -> Mapping:
        """Maps the sender's device memory. Raises WeightTransferError: this process cannot."""
        mapping = self._open_medium(self._source.device_memory, self._device)
        proof = mapping.data[-_PROOF_BYTES:].cpu().numpy().tobytes()
        if proof != self._source.proof:
            mapping.close()
            do = "nothing: shared memory serves instead"
            raise WeightTransferError(explain("map the sender's device memory", "other memory", do))
        return mapping

    def _medium(self, kind: int) -> Mapping:
        """The medium that a publish uses, mapped."""
        if kind == _DEVICE and self._mapped is not None:
            return self._mapped
        assert self._shared is not None, "a receiver attaches before it joins"
        # The sender reserved its shared memory after this process attached.
        if not self._shared.data.numel():
            self._shared = HostMapping(attach(self._source.path), self._device)
        return self._shared


def _send_staged(
    packer: Packer, stage: Stage, slots: Sequence[torch.Tensor], channel: SenderChannel, deadline: Deadline
) -> None:
    """Copies each bucket to shared memory while the next is gathered and packed."""
    buckets = packer.manifest.buckets
    try:
        for bucket in buckets:
            packer.pack(bucket, stage.place)
            if bucket.index:
                stage.wait()
                channel.tell(Kind.BUCKET, bucket.index - 1)
            channel.wait_acked(bucket.index - len(slots), deadline)
            stage.begin(slots[bucket.index % len(slots)][: bucket.nbytes])
    finally:
        stage.wait()  # also on errors: no copy may write into the next publish's ring
    channel.tell(Kind.BUCKET, len(buckets) - 1)


def _slot_bytes(bucket_bytes: int) -> int:
    """Slots begin on pages, so that neighbours share no cache line."""
    return bucket_bytes + -bucket_bytes % _PAGE_BYTES


def _slots(ring: torch.Tensor, bucket_bytes: int) -> tuple[torch.Tensor, ...]:
    """Views of [slot bytes] uint8 each."""
    return ring.split(_slot_bytes(bucket_bytes))
