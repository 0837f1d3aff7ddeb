"""A directory that `sharded_state.save` wrote, read as data: nothing in it is executed.

torch.distributed.checkpoint keeps names, shapes and places of the tensors in `.metadata`, a pickle, and a pickle can
call any function that it names. Here its few classes become records without code, every field is checked, and torch's
reader gets values built from the checked fields. Entries that are not tensors are refused, because torch unpickles them
without restriction. `torch.load` reads the tensors themselves, with `weights_only`.
"""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncrl.errors import ConfigError, explain

_METADATA = ".metadata"
_OF_METADATA = (
    "Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata ChunkStorageMetadata "
    "BytesStorageMetadata _MEM_FORMAT_ENCODING"
)
_KNOWN = {("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA.split()} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
_ANOTHER = "name another checkpoint, or its run directory for the newest intact one"
_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    MemoryError,
)
"""Errors of an unpickler on bytes that no pickler wrote."""


class StoredState:
    """The tensors of one trainer directory: their names and shapes, and their content on request."""

    def __init__(self, directory: Path, asked: str) -> None:
        """`asked`: the purpose of opening it, for messages.

        Raises:
            ConfigError: there is no checkpoint, or `sharded_state.save` did not write it.
        """
        self._asked, self._directory = asked, directory
        try:
            self.entries, places = _checked(_unpickled(directory / _METADATA), directory)
        except FileNotFoundError as error:
            found = "no checkpoint there" if error.filename == str(directory / _METADATA) else str(error)
            do = "name the trainer directory of a checkpoint"
            raise ConfigError(explain(asked, found, do)) from error
        except _Forbidden as error:
            do = "do not use this checkpoint: somebody put code into it that runs where it is unpickled"
            raise ConfigError(explain(asked, f"{_METADATA} names {error}, which no checkpoint needs", do)) from error
        except (OSError, *_BROKEN) as error:
            raise self.unfit(f"{_METADATA} is none that asyncrl writes: {type(error).__name__}: {error}") from error
        self._metadata = Metadata(dict(self.entries), storage_data=places, storage_meta=StorageMeta())

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name].size)

    def empty(self, name: str) -> torch.Tensor:
        return torch.empty(self.entries[name].size, dtype=self.entries[name].properties.dtype)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor `name`. Needs no process group. Raises ConfigError."""
        tensor = self.empty(name)
        self.read_into({name: tensor}, alone=True)
        return tensor

    def read_into(self, wanted: dict[str, torch.Tensor], *, alone: bool = False) -> None:
        """Fills the tensors of `wanted`, or this rank's shards of them; collective unless `alone`.

        Raises:
            ConfigError: the content of a tensor cannot be read.
        """
        try:
            dcp.load(wanted, storage_reader=_Reader(self._directory, self._metadata), no_dist=alone)
        except CheckpointException as error:  # not an Exception: it must not leave this process unconverted
            raise self.unfit(by_rank(error)) from error

    def unfit(self, found: str, do: str = _ANOTHER) -> ConfigError:
        return ConfigError(explain(self._asked, found, do))


def by_rank(error: CheckpointException) -> str:
    """Which rank failed and why, each in a line's worth of text."""
    return "; ".join(
        f"rank {rank}: {type(e).__name__}: {str(e).partition(chr(10))[0]}"
        for rank, (e, _) in sorted(error.failures.items())
    )


class _Reader(dcp.FileSystemReader):
    """torch's reader with metadata that was read and checked before."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._checked = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._checked


class _Forbidden(Exception):
    """A pickle names something that no checkpoint needs."""


class _Record:
    """Stands for a pickled object; its class is made for it and has the object's class name."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        """Constructor arguments are ignored."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return type(name, (_Record,), {})  # a new class each time: a pickle can write to it
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise _Forbidden(f"{module}.{name}")


def _unpickled(path: Path) -> Any:
    with path.open("rb") as file:
        return _Unpickler(file).load()


def _checked(root: Any, directory: Path) -> tuple[dict[str, TensorStorageMetadata], dict[MetadataIndex, _StorageInfo]]:
    """Tensors by name, and the location of each of their chunks. Raises ValueError, KeyError, FileNotFoundError."""
    metadata = _fields(root, "Metadata")
    named = _typed(metadata["state_dict_metadata"], dict)
    tensors = {_typed(name, str): _fields(entry, "TensorStorageMetadata") for name, entry in named.items()}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for index, info in _typed(metadata["storage_data"], dict).items():
        key = _fields(index, "MetadataIndex")
        at = MetadataIndex(_typed(key["fqn"], str), _size(key["offset"]), _typed(key.get("index"), int))
        places[at] = _place(_fields(info, "_StorageInfo"), directory)
    return {name: _entry(name, entry, places) for name, entry in tensors.items()}, places


def _entry(name: str, entry: dict[str, Any], places: dict[MetadataIndex, _StorageInfo]) -> TensorStorageMetadata:
    dtype = _typed(_typed(_record(entry["properties"], "TensorProperties").state, tuple)[0], torch.dtype)
    chunks, held = [], 0
    for chunk in _typed(entry["chunks"], list):
        of = _fields(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_size(of["offsets"]), _size(of["sizes"])))
        place, nbytes = places[MetadataIndex(name, chunks[-1].offsets)], math.prod(chunks[-1].sizes) * dtype.itemsize
        if place.length < nbytes:
            raise ValueError(f"{name} has {place.length} bytes of {nbytes}")
        held += nbytes
    size = _size(entry["size"])
    if held < math.prod(size) * dtype.itemsize:
        raise ValueError(f"{name} has {held} bytes for the shape {list(size)}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _place(info: dict[str, Any], directory: Path) -> _StorageInfo:
    path = _typed(info["relative_path"], str)
    offset, length = _typed(info["offset"], int), _typed(info["length"], int)
    if path in ("", ".", "..") or os.path.basename(path) != path or "\0" in path:
        raise ValueError(f"{path!r} is no file beside it")
    if info.get("transform_descriptors"):
        raise ValueError(f"{path} is compressed")
    if min(offset, length) < 0 or offset + length > (directory / path).stat().st_size:
        raise ValueError(f"{path} has no {length} bytes at {offset}")
    return _StorageInfo(path, offset, length)


def _record(value: Any, name: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != name:
        raise ValueError(f"a {type(value).__name__} where {name} is due")
    return value


def _fields(value: Any, name: str) -> dict[str, Any]:
    return _typed(_record(value, name).state, dict)


def _size(value: Any) -> torch.Size:
    if not all(_typed(n, int) >= 0 for n in _typed(value, tuple)):
        raise ValueError(f"{value} is no shape")
    return torch.Size(value)


def _typed(value: Any, of: type) -> Any:
    if type(value) is not of and not (of is torch.dtype and isinstance(value, of)):
        raise ValueError(f"a {type(value).__name__} where {of.__name__} is due")
    return value
