"""Tensors to buckets and back: what both ends of every transport do with the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import Bucket, Manifest, TensorSpec
from asyncrl.weights.digest import combine, make_scratch, slice_digest
from asyncrl.weights.plan import make_spec
from asyncrl.weights.transport import Digest, WeightSink


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The spec under which `tensor` is published."""
    return make_spec(name, tuple(tensor.shape), dtype_name(tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """[nbytes] uint8: the bytes of `tensor` in row-major order; a view unless it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def check_fits(manifest: Manifest, bucket_bytes: int) -> None:
    """Raises WeightTransferError: a bucket of the manifest is larger than the transport's."""
    largest = max((b.nbytes for b in manifest.buckets), default=0)
    if largest > bucket_bytes:
        asked = f"publish {manifest.publish_id} through buckets of {bucket_bytes} bytes"
        raise WeightTransferError(
            explain(asked, f"a bucket of {largest} bytes", "plan with the bucket_bytes of the transport")
        )


class Digester:
    """Adds up the digests of the slices of one publish, one number per tensor."""

    def __init__(self, manifest: Manifest) -> None:
        self._enabled = manifest.verify
        self._totals = [0] * len(manifest.tensors)
        self._scratch: torch.Tensor | None = None

    def add(self, tensor: int, offset: int, data: torch.Tensor) -> None:
        """Counts `data`, [n] uint8, as bytes `[offset, offset + n)` of tensor number `tensor`."""
        if not self._enabled:
            return
        if self._scratch is None or self._scratch.device != data.device:
            self._scratch = make_scratch(data.device)
        self._totals[tensor] = combine(self._totals[tensor], slice_digest(data, offset, self._scratch))

    def result(self) -> Digest | None:
        return tuple(self._totals) if self._enabled else None


class Packer:
    """Walks the weights of one publish and fills its buckets; holds one tensor at a time.

    Raises (every method) WeightTransferError: a tensor is missing, extra, out of order or of another shape or dtype.
    """

    def __init__(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._manifest = manifest
        self._weights: Iterator[tuple[str, torch.Tensor]] = iter(weights)
        self._current = -1
        self._data = torch.empty(0, dtype=torch.uint8)
        self._digester = Digester(manifest)

    def pack(self, bucket: Bucket, out: torch.Tensor) -> None:
        """Fills `out`, [>= bucket.nbytes] uint8. The last bucket also proves that no weight is left over, so that an
        extra tensor is known before receivers have everything."""
        for piece in bucket.slices:
            while self._current < piece.tensor:
                self._advance()
            data = self._data[piece.offset : piece.offset + piece.nbytes]
            self._digester.add(piece.tensor, piece.offset, data)
            out[piece.bucket_offset : piece.bucket_offset + piece.nbytes].copy_(data)
        if bucket.index == len(self._manifest.buckets) - 1:
            self.finish()

    def finish(self) -> Digest | None:
        """Checks that the weights end where the manifest does; returns the digest if the manifest asks for it."""
        while self._current < len(self._manifest.tensors) - 1:
            self._advance()
        extra = next(self._weights, None)
        if extra is not None:
            raise WeightTransferError(
                explain(
                    f"publish {len(self._manifest.tensors)} tensors",
                    f"one more: {extra[0]}",
                    "make named_weights() yield what weight_specs() lists",
                )
            )
        self._data = self._data[:0].clone()
        return self._digester.result()

    def _advance(self) -> None:
        self._current += 1
        expected = self._manifest.tensors[self._current]
        asked = f"publish tensor {self._current}: {_describe(expected)}"
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
    """Hands the slices of received buckets to a sink, in manifest order, with empty tensors in their places."""

    def __init__(self, manifest: Manifest, sink: WeightSink) -> None:
        self._manifest = manifest
        self._sink = sink
        self._next_tensor = 0
        self._digester = Digester(manifest)

    def unpack(self, bucket: Bucket, data: torch.Tensor) -> None:
        """`data`: [>= bucket.nbytes] uint8. Raises what the sink raises."""
        for piece in bucket.slices:
            self._write_empty_tensors(piece.tensor)
            view = data[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
            self._digester.add(piece.tensor, piece.offset, view)
            self._sink.write(self._manifest.tensors[piece.tensor], piece.offset, view)
            self._next_tensor = piece.tensor + 1

    def finish(self) -> Digest | None:
        """Writes the empty tensors after the last bucket; returns the digest if the manifest asks for it."""
        self._write_empty_tensors(len(self._manifest.tensors))
        return self._digester.result()

    def _write_empty_tensors(self, before: int) -> None:
        while self._next_tensor < before:
            self._sink.write(self._manifest.tensors[self._next_tensor], 0, torch.empty(0, dtype=torch.uint8))
            self._next_tensor += 1


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name}, {spec.dtype} {spec.shape}"
