"""Weights as files of Hugging Face's layout: safetensors shards and their index.

The plan (tensor -> file and byte) is a pure function of the manifest, so sender and receivers agree on it. Within a
file, tensors of wider elements come first, so that each is aligned to its element size. Source of the format:
safetensors (8 bytes of length, a JSON header padded with spaces, the data without gaps).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.json_records import sync
from asyncrl.types import TensorSpec
from asyncrl.weights.plan import DTYPE_BYTES, DTYPES, runs_of

INDEX_NAME = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
"""Largest file, unless one tensor alone is larger."""

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """`names`, `headers`: per file; a header is all bytes before the data. `places`: per tensor of the manifest, (file
    number, first byte in the file)."""

    names: tuple[str, ...]
    headers: tuple[bytes, ...]
    places: tuple[tuple[int, int], ...]
    index: bytes


def plan_shards(tensors: Sequence[TensorSpec], shard_bytes: int = SHARD_BYTES) -> ShardPlan:
    """Files of about `shard_bytes` that hold every tensor once, in manifest order from file to file."""
    shards = list(runs_of(range(len(tensors)), lambda number: tensors[number].nbytes, shard_bytes)) if tensors else []
    names = tuple(f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards)))
    headers: list[bytes] = []
    places = [(0, 0)] * len(tensors)
    for shard, members in enumerate(shards):
        header, starts = _header([tensors[m] for m in members])
        headers.append(header)
        for member, start in zip(members, starts, strict=True):
            places[member] = (shard, start)
    weight_map = {spec.name: names[places[i][0]] for i, spec in enumerate(tensors)}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": weight_map}
    return ShardPlan(names, tuple(headers), tuple(places), json.dumps(index, indent=2).encode())


def _header(specs: Sequence[TensorSpec]) -> tuple[bytes, list[int]]:
    """The header of a file of these tensors, and each tensor's first byte in the file."""
    order = sorted(range(len(specs)), key=lambda i: -DTYPE_BYTES[specs[i].dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = [0] * len(specs), 0
    for i in order:
        spec = specs[i]
        offsets[i], end = end, end + spec.nbytes
        entries[spec.name] = {
            "dtype": DTYPES[spec.dtype][1],
            "shape": list(spec.shape),
            "data_offsets": [offsets[i], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = _LENGTH.pack(len(text)) + text
    return header, [len(header) + offset for offset in offsets]


class ShardWriter:
    """Writes one publish into `directory`, one file after the other; slices come in manifest order.

    Raises (every method) WeightTransferError: the file system refuses, e.g. because it is full.
    """

    def __init__(self, directory: Path, plan: ShardPlan) -> None:
        self._directory = directory
        self._plan = plan
        self._shard = -1
        self._fd = -1
        self._path = directory

    def write(self, tensor: int, offset: int, data: torch.Tensor) -> None:
        """`data`: [n] uint8 on the CPU, bytes `[offset, offset + n)` of tensor number `tensor`."""
        shard, start = self._plan.places[tensor]
        self._advance(shard)
        self._pwrite(data.numpy().data, start + offset)

    def finish(self) -> None:
        """Writes the remaining files and the index; all are synced to disk on return."""
        self._advance(len(self._plan.names))
        self._open(INDEX_NAME)
        self._pwrite(memoryview(self._plan.index), 0)
        self._seal()
        with writing(self._directory):
            sync(self._directory)

    def close(self) -> None:
        """Idempotent; without `finish` the files are incomplete."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _advance(self, shard: int) -> None:
        # Also creates files without a slice of their own (tensors of zero bytes).
        while self._shard < shard:
            self._seal()
            self._shard += 1
            if self._shard < len(self._plan.names):
                self._open(self._plan.names[self._shard])
                self._pwrite(memoryview(self._plan.headers[self._shard]), 0)

    def _open(self, name: str) -> None:
        self._path = self._directory / name
        with writing(self._path):
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _seal(self) -> None:
        if self._fd >= 0:
            with writing(self._path):
                os.fsync(self._fd)
            self.close()

    def _pwrite(self, data: memoryview, position: int) -> None:
        while data:
            with writing(self._path):
                written = os.pwrite(self._fd, data, position)
            data, position = data[written:], position + written


class ShardReader:
    """Reads one publish from `directory`. Files are read, not mapped: touching a mapped file that shrank kills the
    process."""

    def __init__(self, directory: Path, plan: ShardPlan) -> None:
        self._directory = directory
        self._plan = plan
        self._shard = -1
        self._fd = -1

    def read(self, tensor: int, offset: int, out: torch.Tensor) -> None:
        """Fills `out`, [n] uint8 on the CPU, with bytes `[offset, offset + n)` of tensor number `tensor`.

        Raises WeightTransferError: the named file is gone, too short, or not the plan's.
        """
        shard, start = self._plan.places[tensor]
        if shard != self._shard:
            self._open(shard)
        self._pread(out.numpy().data, start + offset)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._shard = self._fd = -1

    def _open(self, shard: int) -> None:
        self.close()
        try:
            self._fd = os.open(self._directory / self._plan.names[shard], os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._broken(shard, str(error.strerror)) from error
        self._shard = shard
        expected = self._plan.headers[shard]
        header = bytearray(len(expected))
        self._pread(memoryview(header), 0)
        if header != expected:
            raise self._broken(shard, "its header is not that of this publish")

    def _pread(self, out: memoryview, position: int) -> None:
        while out:
            try:
                read = os.preadv(self._fd, [out], position)
            except OSError as error:
                raise self._broken(self._shard, str(error.strerror)) from error
            if not read:
                raise self._broken(self._shard, f"it ends at byte {position}")
            out, position = out[read:], position + read

    def _broken(self, shard: int, found: str) -> WeightTransferError:
        do = "look at the disk and at who else uses weights.disk_directory"
        return WeightTransferError(explain(f"read {self._directory / self._plan.names[shard]}", found, do))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises WeightTransferError, naming `path`, instead of OSError."""
    try:
        yield
    except OSError as error:
        do = "free space, or set weights.disk_directory to another file system"
        raise WeightTransferError(explain(f"write weights to {path}", str(error.strerror), do)) from error
