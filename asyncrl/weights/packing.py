"""Packs tensors into buckets and unpacks them again; both ends of every transport use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import Bucket, Digest, DigestKind, Manifest, TensorSlice, TensorSpec
from asyncrl.weights.digest import combine, copy_with_digest, make_scratch, slice_digest
from asyncrl.weights.plan import make_spec
from asyncrl.weights.transport import DirectSink, WeightSink


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The spec under which `tensor` is published."""
    return make_spec(name, tuple(tensor.shape), dtype_name(tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """[nbytes] uint8: the bytes of `tensor` in row-major order; a view unless it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def separate(buckets: Sequence[Bucket], min_bytes: int) -> tuple[Bucket, ...]:
    """The same slices in the same order: a slice of at least `min_bytes` gets its own bucket, which needs no packing;
    runs of smaller slices share one."""
    separated: list[Bucket] = []

    def seal(slices: list[TensorSlice]) -> None:
        if slices:
            begin = slices[0].bucket_offset
            nbytes = slices[-1].bucket_offset + slices[-1].nbytes - begin
            moved = tuple(TensorSlice(s.tensor, s.offset, s.nbytes, s.bucket_offset - begin) for s in slices)
            separated.append(Bucket(len(separated), nbytes, moved))
            slices.clear()

    for bucket in buckets:
        together: list[TensorSlice] = []
        for piece in bucket.slices:
            if piece.nbytes >= min_bytes:
                seal(together)
                seal([piece])
            else:
                together.append(piece)
        seal(together)
    return tuple(separated)


class Digester:
    """Adds up the digests of the slices of one publish, one number per tensor."""

    def __init__(self, manifest: Manifest, kind: DigestKind = "xxh3") -> None:
        self.enabled = manifest.verify
        self._kind: DigestKind = kind
        self._totals = [0] * len(manifest.tensors)
        self._scratch: torch.Tensor | None = None

    def add(self, tensor: int, offset: int, data: torch.Tensor) -> None:
        """Counts `data`, [n] uint8, as bytes `[offset, offset + n)` of tensor number `tensor`."""
        if not self.enabled:
            return
        if self._kind == "words" and (self._scratch is None or self._scratch.device != data.device):
            self._scratch = make_scratch(data.device)
        self._totals[tensor] = combine(self._totals[tensor], slice_digest(data, offset, self._kind, self._scratch))

    def copy(self, tensor: int, offset: int, data: torch.Tensor, out: torch.Tensor) -> None:
        """As `add`, and copies `data` to `out`; together they cost less than one after the other."""
        if self.enabled and self._kind == "xxh3" and data.device.type == out.device.type == "cpu":
            self._totals[tensor] = combine(self._totals[tensor], copy_with_digest(out, data, offset))
        else:
            self.add(tensor, offset, data)
            out.copy_(data)

    def result(self) -> Digest | None:
        return tuple(self._totals) if self.enabled else None


class Packer:
    """Fills the buckets of one publish from its weights; holds one tensor at a time.

    Raises (every method) WeightTransferError: a tensor is missing, extra, out of order or of another shape or dtype.
    """

    def __init__(
        self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], digest: DigestKind = "xxh3"
    ) -> None:
        self.manifest = manifest
        self._weights: Iterator[tuple[str, torch.Tensor]] = iter(weights)
        self._current = -1
        self._data = torch.empty(0, dtype=torch.uint8)
        self._digester = Digester(manifest, digest)
        last = manifest.buckets[-1].slices[-1] if manifest.buckets else TensorSlice(-1, 0, 0, 0)
        self._end = (last.tensor, last.offset + last.nbytes)

    def moves_on(self, bucket: Bucket) -> bool:
        """True if filling `bucket` advances to the next tensor, which frees or overwrites the current one."""
        last = bucket.slices[-1]
        return last.tensor > self._current or (last.tensor, last.offset + last.nbytes) == self._end

    def device_of(self, bucket: Bucket) -> torch.device:
        """Device of the first tensor of the next bucket."""
        self._take(bucket.slices[0].tensor)
        return self._data.device

    def view(self, bucket: Bucket, device: torch.device) -> torch.Tensor | None:
        """[bucket.nbytes] uint8: a view of the tensor's memory; None if `pack` is needed.

        Finish sending the view before the packer `moves_on`. The last bucket is always packed: it is sent only once no
        further tensor is known to come.
        """
        piece = bucket.slices[0]
        if len(bucket.slices) != 1 or (piece.tensor, piece.offset + piece.nbytes) == self._end:
            return None
        self._take(piece.tensor)
        if self._data.device != device:
            return None
        data = self._data[piece.offset : piece.offset + piece.nbytes]
        self._digester.add(piece.tensor, piece.offset, data)
        return data

    def pack(self, bucket: Bucket, out: torch.Tensor) -> None:
        """Fills `out`, [>= bucket.nbytes] uint8. The last bucket also checks that no weight is left over, before
        receivers have everything."""
        for piece in bucket.slices:
            self._take(piece.tensor)
            data = self._data[piece.offset : piece.offset + piece.nbytes]
            place = out[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
            self._digester.copy(piece.tensor, piece.offset, data, place)
            if (piece.tensor, piece.offset + piece.nbytes) == self._end:
                self.finish()

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, for a sender that packs in its own way; instead of `pack`, and not digested."""
        for number, spec in enumerate(self.manifest.tensors):
            self._take(number)
            yield spec.name, self._data.view(getattr(torch, spec.dtype)).view(spec.shape)

    def finish(self) -> Digest | None:
        """Checks that the weights end where the manifest does; returns the digest if the manifest asks for it."""
        self._take(len(self.manifest.tensors) - 1)
        extra = next(self._weights, None)
        if extra is not None:
            asked, do = (
                f"publish {len(self.manifest.tensors)} tensors",
                "make named_weights() yield what weight_specs() lists",
            )
            raise WeightTransferError(explain(asked, f"one more: {extra[0]}", do))
        self._data = self._data[:0].clone()
        return self._digester.result()

    def _take(self, tensor: int) -> None:
        while self._current < tensor:
            self._advance()

    def _advance(self) -> None:
        self._current += 1
        expected = self.manifest.tensors[self._current]
        asked = f"publish tensor {self._current}: {expected.name}, {expected.dtype} {expected.shape}"
        do = "make named_weights() yield what weight_specs() lists, in the same order"
        item = next(self._weights, None)
        if item is None:
            raise WeightTransferError(explain(asked, "the weights ended before it", do))
        name, tensor = item
        if name != expected.name or dtype_name(tensor.dtype) != expected.dtype or tuple(tensor.shape) != expected.shape:
            found = f"{name}, {dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            raise WeightTransferError(explain(asked, found, do))
        self._data = byte_view(tensor)


class Unpacker:
    """Passes the slices of received buckets to a sink, in manifest order, including empty tensors.

    Every bucket goes either to `unpack` or, after `destination`, to `landed`.
    """

    def __init__(self, manifest: Manifest, sink: WeightSink, digest: DigestKind = "xxh3") -> None:
        self.manifest = manifest
        self._sink = sink
        self._direct = sink if isinstance(sink, DirectSink) else None
        self._next_tensor = 0
        self._digester = Digester(manifest, digest)

    def unpack(self, bucket: Bucket, data: torch.Tensor) -> None:
        """`data`: [>= bucket.nbytes] uint8. Raises the sink's errors."""
        for piece in bucket.slices:
            self._write_empty_tensors(piece.tensor)
            self._write(piece, data[piece.bucket_offset : piece.bucket_offset + piece.nbytes])
            self._next_tensor = piece.tensor + 1

    def destination(self, bucket: Bucket, device: torch.device) -> torch.Tensor | None:
        """[bucket.nbytes] uint8: the sink's memory to receive the bucket into; None if it must be unpacked. May run
        ahead of `unpack` and `landed`. Raises the sink's errors."""
        if len(bucket.slices) != 1 or self._direct is None:
            return None
        piece = bucket.slices[0]
        return self._direct.destination(self.manifest.tensors[piece.tensor], piece.offset, piece.nbytes, device)

    def landed(self, bucket: Bucket, place: torch.Tensor) -> None:
        """The bucket is complete in `place`, from `destination`. Raises the sink's errors."""
        assert self._direct is not None, "a sink without memory of its own has no destination"
        piece = bucket.slices[0]
        self._write_empty_tensors(piece.tensor)
        self._digester.add(piece.tensor, piece.offset, place)
        self._direct.wrote(self.manifest.tensors[piece.tensor], piece.offset, piece.nbytes)
        self._next_tensor = piece.tensor + 1

    def _write(self, piece: TensorSlice, data: torch.Tensor) -> None:
        """Writes one slice; digests it and copies it to a `DirectSink` in one pass."""
        spec, place = self.manifest.tensors[piece.tensor], None
        if self._digester.enabled and self._direct is not None:
            place = self._direct.destination(spec, piece.offset, piece.nbytes, data.device)
        if place is None or self._direct is None:
            self._digester.add(piece.tensor, piece.offset, data)
            self._sink.write(spec, piece.offset, data)
        else:
            self._digester.copy(piece.tensor, piece.offset, data, place)
            self._direct.wrote(spec, piece.offset, piece.nbytes)

    def finish(self) -> Digest | None:
        """Writes the empty tensors after the last bucket; returns the digest if the manifest asks for it."""
        self._write_empty_tensors(len(self.manifest.tensors))
        return self._digester.result()

    def _write_empty_tensors(self, before: int) -> None:
        while self._next_tensor < before:
            self._sink.write(self.manifest.tensors[self._next_tensor], 0, torch.empty(0, dtype=torch.uint8))
            self._next_tensor += 1
