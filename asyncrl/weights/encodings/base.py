"""The model's own files as the base of publishes, memory-mapped once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.weights.encodings.lora import LORA_A, LORA_B, adapted

_STEM = "model"
"""How the names of the files begin that transformers reads."""
_COMPUTED = ".rotary_emb.inv_freq"
"""Suffix of names in old checkpoints that no model reads."""


_BLOCK_BYTES = 1 << 20
"""Bytes of float32 rows merged at a time on a CPU, so that they stay in a core's cache."""


class Merge:
    """W_0 + B A of one tensor, computed by blocks of rows in float32 on the factors' device. Fixed blocks make the
    result bitwise reproducible."""

    def __init__(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        self._weight, self._a, self._b = weight, a, b

    @staticmethod
    def of(name: str, weight: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> Merge | None:
        """The merge of tensor `name`; None if it has no adapter."""
        stem = name.removesuffix(".weight")
        return Merge(weight, factors[stem + LORA_A], factors[stem + LORA_B]) if stem + LORA_A in factors else None

    @property
    def device(self) -> torch.device:
        return self._a.device

    def blocks(self) -> Iterator[slice]:
        """Slices of rows, in order."""
        rows, columns = self._weight.shape
        step = max(1, _BLOCK_BYTES // (4 * columns)) if self.device.type == "cpu" else rows
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def rows(self, block: slice, out: torch.Tensor | None = None) -> torch.Tensor:
        """`out`: float32 memory for the result; None takes new memory."""
        weight = self._weight[block].to(self.device, torch.float32)
        return torch.addmm(weight, self._b[block], self._a, out=out)


def merged(name: str, weight: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`weight` with its adapter merged, float32; unchanged if it has none."""
    merge = Merge.of(name, weight, factors)
    return weight if merge is None else torch.cat([merge.rows(block) for block in merge.blocks()])


class BaseWeights:
    """The tensors of a model's safetensors files.

    The files stay mapped while this object lives; a removed file stays readable. All processes of the machine share the
    pages.
    """

    def __init__(self, path: str, revision: str | None = None) -> None:
        """`path`: a directory, or a hub name, whose files are downloaded if missing.

        Raises:
            WeightTransferError: there are no safetensors files.
        """
        self._path = path
        self._file_of = open_files(path, revision)
        self._views: dict[str, torch.Tensor] = {}
        if not self._file_of:
            asked = f"merge adapters into model.path={path}"
            raise WeightTransferError(explain(asked, "no *.safetensors in it", "save the model as safetensors"))

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the files."""
        return tuple(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header of its file."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    @cached_property
    def exact(self) -> frozenset[str]:
        """The tensors that files of 16-bit weights keep in float32: choices of experts and decays depend on their last
        bits."""
        dtypes = {name: file.get_slice(name).get_dtype() for name, file in self._file_of.items()}
        found = frozenset(name for name, dtype in dtypes.items() if dtype == "F32")
        return found if 2 * len(found) < len(dtypes) else frozenset()

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the mapped file, in its dtype. Do not write to it."""
        if name not in self._views:
            self._views[name] = self._file_of[name].get_tensor(name)
        return self._views[name]

    def require(self, names: frozenset[str]) -> None:
        """Raises WeightTransferError: a tensor that has an adapter is not in the files."""
        for name in sorted(names - self._file_of.keys()):
            asked, found = f"merge an adapter into {name!r}", f"the files of {self._path} have no such tensor"
            raise WeightTransferError(explain(asked, found, "train and serve the same model.path"))

    def merged(self, factors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the model: float32 with an adapter, otherwise in the dtype of the file.

        Raises:
            WeightTransferError: as `require`; before the first tensor.
        """
        self.require(adapted(factors))
        for name in self._file_of:
            yield name, merged(name, self.tensor(name), factors)


def open_files(path: str, revision: str | None) -> dict[str, Any]:
    """The mapped file of each tensor, in the order of the files; empty if none is of safetensors. `path` as in
    `BaseWeights`. Raises OSError, or ValueError: a file is damaged."""
    from safetensors import SafetensorError, safe_open

    directory = Path(path).expanduser()
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        patterns = [f"{_STEM}*.safetensors", f"{_STEM}.safetensors.index.json"]
        directory = Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
    index, single = directory / f"{_STEM}.safetensors.index.json", directory / f"{_STEM}.safetensors"
    if index.is_file():
        wanted = {directory / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    else:  # a repository may have the weights a second time, under other names
        wanted = {single} if single.is_file() else set(directory.glob("*.safetensors"))
    found: dict[str, Any] = {}
    for file in sorted(wanted):
        try:
            stored = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{file.name} cannot be read: {error}") from error
        found.update((name, stored) for name in stored.keys() if not name.endswith(_COMPUTED))  # noqa: SIM118 - no dict
    return found
