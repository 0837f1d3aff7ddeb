"""Which bytes of which tensor travel in which bucket. Pure: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

from asyncrl.errors import ConfigError, WeightTransferError, explain
from asyncrl.types import Bucket, Digest, Encoding, Manifest, TensorSlice, TensorSpec
from asyncrl.weights.encodings import CHECKS

T = TypeVar("T")

ALIGNMENT = 16
"""Slices begin at multiples of this many bytes in bucket and tensor: they can be viewed in any dtype and moved with
vector instructions."""

DTYPES = {
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "bfloat16": (2, "BF16"),
    "float16": (2, "F16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint8": (1, "U8"),
    "uint16": (2, "U16"),
    "uint32": (4, "U32"),
    "uint64": (8, "U64"),
    "bool": (1, "BOOL"),
}
"""The dtypes that can be published, by torch's name: bytes per element, and the name in safetensors."""
DTYPE_BYTES = {name: nbytes for name, (nbytes, _) in DTYPES.items()}


def make_spec(name: str, shape: Sequence[int], dtype: str) -> TensorSpec:
    """The spec of one tensor. Raises WeightTransferError: the dtype cannot be published."""
    if dtype not in DTYPE_BYTES:
        do = f"cast it to one of {', '.join(DTYPE_BYTES)}"
        raise WeightTransferError(explain(f"publish tensor {name}", f"dtype {dtype}", do))
    return TensorSpec(name, tuple(int(n) for n in shape), dtype, prod(shape) * DTYPE_BYTES[dtype])


def runs_of(items: Iterable[T], size_of: Callable[[T], int], largest: int) -> Iterator[list[T]]:
    """The items in order, in runs of at most `largest` together; a larger item is alone. Without items: one run."""
    run: list[T] = []
    held = 0
    for item in items:
        if run and held + size_of(item) > largest:
            yield run
            run, held = [], 0
        run.append(item)
        held += size_of(item)
    yield run


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes` that hold every byte of every tensor exactly once, in tensor order.

    A tensor that fits into one bucket is never cut; it opens a new bucket if the current one lacks room. Larger tensors
    are cut at multiples of 16 bytes. Tensors without elements appear in no slice.

    Raises:
        ConfigError: `bucket_bytes` is below 16.
    """
    capacity = bucket_bytes - bucket_bytes % ALIGNMENT
    if capacity < ALIGNMENT:
        do = "raise weights.bucket_bytes"
        raise ConfigError(explain(f"buckets of {bucket_bytes} bytes", f"less than {ALIGNMENT}", do))
    buckets: list[Bucket] = []
    slices: list[TensorSlice] = []
    filled = 0

    def seal() -> None:
        nonlocal filled
        if slices:
            buckets.append(Bucket(len(buckets), slices[-1].bucket_offset + slices[-1].nbytes, tuple(slices)))
        slices.clear()
        filled = 0

    for number, spec in enumerate(specs):
        # A tensor that fits into one bucket is never cut.
        if filled and capacity - filled < spec.nbytes <= capacity:
            seal()
        offset = 0
        while offset < spec.nbytes:
            if filled == capacity:
                seal()
            nbytes = min(spec.nbytes - offset, capacity - filled)
            slices.append(TensorSlice(number, offset, nbytes, filled))
            offset += nbytes
            filled += nbytes + -nbytes % ALIGNMENT
    seal()
    return tuple(buckets)


def check_fits(manifest: Manifest, bucket_bytes: int) -> None:
    """Raises WeightTransferError: a bucket of the manifest is larger than the transport's."""
    largest = max((b.nbytes for b in manifest.buckets), default=0)
    if largest > bucket_bytes:
        asked = f"publish {manifest.publish_id} through buckets of {bucket_bytes} bytes"
        do = "plan with the bucket_bytes of the transport"
        raise WeightTransferError(explain(asked, f"a bucket of {largest} bytes", do))


def part_manifests(manifest: Manifest, first_tensors: Sequence[int], bucket_bytes: int) -> tuple[Manifest, ...]:
    """One manifest per sending rank, with its own buckets; a pure function, so both sides agree.

    Args:
        first_tensors: number of each part's first tensor; 0 first, then not falling.
        bucket_bytes: of the transport.

    Raises:
        ConfigError: as `plan_buckets`.
        WeightTransferError: as `check_fits`.
    """
    check_fits(manifest, bucket_bytes)
    ends = (*first_tensors[1:], len(manifest.tensors))
    runs = [manifest.tensors[first:end] for first, end in zip(first_tensors, ends, strict=True)]
    return tuple(replace(manifest, tensors=run, buckets=plan_buckets(run, bucket_bytes)) for run in runs)


def make_manifest(
    publish_id: int,
    version: int | None,
    tensors: Sequence[TensorSpec],
    bucket_bytes: int,
    *,
    verify: bool = True,
    encoding: Encoding = "full",
    base_digest: Digest | None = None,
) -> Manifest:
    """The manifest of one publish of `tensors`, cut into buckets of `bucket_bytes`. `base_digest`: of encoding delta.

    Raises:
        WeightTransferError: two tensors have one name, a size contradicts shape and dtype, or a tensor does not belong
            to the encoding.
        ConfigError: as `plan_buckets`.
    """
    names: set[str] = set()
    for spec in tensors:
        if spec.name in names:
            do = "name each weight once"
            raise WeightTransferError(explain(f"publish tensor {spec.name}", "two tensors have this name", do))
        names.add(spec.name)
        if spec != make_spec(spec.name, spec.shape, spec.dtype):
            found = f"{spec.nbytes} bytes for shape {spec.shape} of {spec.dtype}"
            raise WeightTransferError(explain(f"publish tensor {spec.name}", found, "build the spec with make_spec"))
    CHECKS[encoding](tensors)
    buckets = plan_buckets(tensors, bucket_bytes)
    return Manifest(publish_id, version, tuple(tensors), buckets, verify, encoding, base_digest=base_digest)
