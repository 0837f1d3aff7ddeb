"""Publishes of low-rank adapters: what a replica makes of them, W = W_0 + B A.

W_0 comes from the model's own files each time, so that nothing drifts however often the weights change. Sent are pairs
`<layer>.lora_A.weight` [rank, in] and `<layer>.lora_B.weight` [out, rank], float32, the latter scaled already.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import Manifest

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_COMPUTED = ".rotary_emb.inv_freq"
"""End of the names that old checkpoints hold and no model reads."""


def is_adapters(manifest: Manifest) -> bool:
    """Whether the publish sends adapters instead of weights."""
    return bool(manifest.tensors) and all(t.name.endswith((LORA_A, LORA_B)) for t in manifest.tensors)


def merged(name: str, weight: torch.Tensor, adapters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`weight` plus B A in float32 where the tensor `name` has an adapter, else as it is."""
    stem = name.removesuffix(".weight")
    if not name.endswith(".weight") or stem + LORA_A not in adapters:
        return weight
    a, b = adapters[stem + LORA_A], adapters[stem + LORA_B]
    return weight.to(a.device, torch.float32).addmm(b, a)


class BaseWeights:
    """The tensors of a model's safetensors files: mapped into memory, and read when they are asked for."""

    def __init__(self, path: str, revision: str | None = None) -> None:
        """`path`: a directory or a hub name, whose files are fetched if they are not here.

        Raises:
            WeightTransferError: there are no safetensors files.
        """
        directory = Path(path).expanduser()
        if not directory.is_dir():
            from huggingface_hub import snapshot_download

            patterns = ["*.safetensors", "*.safetensors.index.json"]
            directory = Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
        self._file_of = _files(directory)
        if not self._file_of:
            raise WeightTransferError(
                explain(
                    f"merge adapters into model.path={path}", "no *.safetensors in it", "save the model as safetensors"
                )
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def merged(
        self, adapters: Mapping[str, torch.Tensor], *, only_adapted: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the model, or those with an adapter alone. Float32 and on the adapters' device where there is
        one, else on the CPU in the dtype of the file.

        Raises:
            WeightTransferError: half of a pair is missing, or the model has no such tensor; before the first tensor.
        """
        from safetensors import safe_open

        adapted = self._adapted(adapters)
        by_file: dict[Path, list[str]] = {}
        for name, file in self._file_of.items():
            if name in adapted or not only_adapted:
                by_file.setdefault(file, []).append(name)
        for file, names in by_file.items():
            with safe_open(file, framework="pt") as stored:
                for name in names:
                    yield name, merged(name, stored.get_tensor(name), adapters)

    def _adapted(self, adapters: Mapping[str, torch.Tensor]) -> frozenset[str]:
        stems = {name.removesuffix(end) for name in adapters for end in (LORA_A, LORA_B) if name.endswith(end)}
        for stem in sorted(stems):
            gone = [what for what in (stem + LORA_A, stem + LORA_B) if what not in adapters]
            if gone or f"{stem}.weight" not in self._file_of:
                found = f"no tensor {gone[0]!r} came" if gone else f"its files have no tensor {stem + '.weight'!r}"
                raise WeightTransferError(
                    explain(f"merge an adapter into {stem!r}", found, "train and serve the same model.path")
                )
        return frozenset(f"{stem}.weight" for stem in stems)


def _files(directory: Path) -> dict[str, Path]:
    """The file of each tensor, in the order of the files."""
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        wanted = {directory / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    else:
        wanted = set(directory.glob("*.safetensors"))
    found: dict[str, Path] = {}
    for file in sorted(wanted):
        with safe_open(file, framework="pt") as stored:
            found.update((name, file) for name in stored.keys() if not name.endswith(_COMPUTED))  # noqa: SIM118 - no dict
    return found
