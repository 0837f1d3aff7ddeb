"""A publish: its tensors and buckets, the source that a receiver joins, and the report of its times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype (torch's name without the prefix, e.g. "bfloat16") of one weight tensor in HF naming."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Bytes `[offset, offset + nbytes)` of tensor number `tensor`, placed at `bucket_offset` of its bucket."""

    tensor: int
    offset: int
    nbytes: int
    bucket_offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One unit of transfer: `nbytes` bytes holding `slices` at 16-byte aligned offsets."""

    index: int
    nbytes: int
    slices: tuple[TensorSlice, ...]


Encoding = Literal["full", "lora", "delta"]
"""The tensors of a publish (`weights/encodings`): weights, adapters to add to the model's own files, or differences to
the previous publish."""

Digest = tuple[int, ...]
"""One unsigned 64-bit number per tensor, in the order of `Manifest.tensors`."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors and buckets of one publish; equal on both sides. Built and checked by `weights.plan.make_manifest`.

    Attributes: version: None keeps the replicas' version.
        verify: both sides compute the digest.
        is_kept: receivers keep a copy of these weights, as the base of later publishes with encoding delta.
        is_staged: receivers hold the tensors in addition to the served model until told to load them.
        base_digest: with encoding delta, of the base weights, each tensor digested whole; else None.
    """

    publish_id: int
    version: int | None
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    verify: bool = True
    encoding: Encoding = "full"
    is_kept: bool = False
    base_digest: Digest | None = None
    is_staged: bool = False

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, slots=True)
class EncodedWeights:
    """The trainer's weights as differences to the previously encoded weights.

    Attributes:
        digest: of the weights, each tensor digested whole (`xxh3`).
        base_digest: the same of the previous weights; None: no base, and `tensors` is empty.
        tensors: specs of the differences, one for each weight, in the same order.
    """

    digest: Digest
    base_digest: Digest | None
    tensors: tuple[TensorSpec, ...]

    @staticmethod
    def joined(parts: Sequence[EncodedWeights]) -> EncodedWeights:
        """Of all weights, from the parts of the ranks that send, in their order."""
        bases = [part.base_digest for part in parts if part.base_digest is not None]
        has_base = len(bases) == len(parts)
        return EncodedWeights(
            digest=tuple(number for part in parts for number in part.digest),
            base_digest=tuple(number for base in bases for number in base) if has_base else None,
            tensors=tuple(spec for part in parts for spec in part.tensors) if has_base else (),
        )


DigestKind = Literal["xxh3", "words"]
"""The digest function (`weights/digest.py`): `xxh3` for host memory, `words` for a GPU's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSource:
    """The data that a receiver needs to join a sender; one subclass per transport below.

    The subclasses are here and not with their senders, because the driver passes them on and does not import torch.

    Attributes:
        endpoint: ZeroMQ endpoint of the sender's control channel (`control_channel.py`).
        receiver: this receiver's number in `[0, num_receivers)`.
        epoch: changes whenever the sender opens again.
        digest: the sender's choice, which receivers follow.
        key: of the control channel; never logged.
    """

    endpoint: str
    bucket_bytes: int
    num_receivers: int
    receiver: int = 0
    epoch: int
    digest: DigestKind = "xxh3"
    key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcSource(TransferSource):
    """The sender's ring in shared memory and, if it has one, its ring in a GPU's memory.

    Attributes:
        path: the file in shared memory.
        host: the sender's machine.
        device_memory: what `Medium.describe` returned; "" without a ring in a GPU's memory.
        proof: the last bytes of the GPU ring; a receiver compares them with its mapping.
    """

    path: str
    host: str
    device_memory: str = ""
    proof: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSource(TransferSource):
    """`store`: host:port at which the process group meets."""

    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSource(TransferSource):
    """`directory`: the sender's own, which holds one directory per publish; or a URL, below which its objects are."""

    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsSource(TransferSource):
    """Several senders, each of a run of the tensors; the fields above are those of the first.

    Attributes:
        parts: one for each sender, as it opened; receivers join each with `receiver` of this source.
        first_tensors: number, in the manifest, of each part's first tensor. A part ends where the next begins.
    """

    parts: tuple[TransferSource, ...]
    first_tensors: tuple[int, ...]

    @staticmethod
    def of(parts: Sequence[TransferSource], first_tensors: Sequence[int]) -> PartsSource:
        common = {field.name: getattr(parts[0], field.name) for field in fields(TransferSource)}
        common["receiver"] = 0
        return PartsSource(**common, parts=tuple(parts), first_tensors=tuple(first_tensors))


@dataclass(frozen=True, slots=True)
class SendingRank:
    """A trainer rank that sends weights. `first_tensor`: the number of its first tensor among all of a publish; its
    last is before the first of the next sending rank."""

    rank: int
    first_tensor: int


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Seconds of the whole publish and of its parts.

    `pause_s`: sum over transfers of (time from pause to commit) * (share of the replicas paused). For a publish to all
    replicas together this is the whole pause, for a rolling one the mean pause of a replica. `attempts`: transfers;
    above 1, or the number of waves, weights were sent again. `replicas` serve the version. `nbytes`: of the model;
    `sent_bytes`: per transfer, on average.
    """

    version: int | None
    publish_s: float
    pause_s: float
    transfer_s: float
    nbytes: int
    sent_bytes: int
    verified: bool
    attempts: int
    replicas: int
