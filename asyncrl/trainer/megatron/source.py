"""Reads a model in Hugging Face format; each rank reads only the slices that it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.megatron.names import Block, LocalTensor
from asyncrl.trainer.megatron.sizes import ModelSizes
from asyncrl.trainer.megatron.supports import unsupported
from asyncrl.types import HOW_TO_TIE, UNTIED, ModelFacts

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class PretrainedModel:
    """The files of `model.path`. Opens a file when its first tensor is read, and keeps it open."""

    def __init__(self, model: ModelConfig, key: str = "model.path") -> None:
        """Reads the config and the index.

        Args:
            key: the key of the recipe that names the model, for errors.

        Raises:
            ConfigError: the model cannot be read, is not in safetensors files, or is not supported.
        """
        from transformers import AutoConfig

        self._asked = f"train {key}={model.path}"
        check_path(model.path, key)
        try:
            config = AutoConfig.from_pretrained(
                model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
            ).to_dict()
            self._directory = _directory(model)
            self._files = self._find_files()
        except (OSError, ValueError) as error:
            do = "name a directory or hub name of a causal LM with *.safetensors files"
            raise ConfigError(explain(self._asked, str(error), do)) from error
        if problems := unsupported(ModelFacts.of_config(model.path, config)):
            found = f"the backend does not support {', '.join(problems)}"
            raise ConfigError(
                explain(f"{self._asked} with trainer.backend=megatron", found, "set trainer.backend=fsdp")
            )
        self.sizes = ModelSizes.of_config(config)
        self._open: dict[Path, Any] = {}
        if self.sizes.tied and _HEAD in self._files and not torch.equal(self._whole(_HEAD), self._whole(_EMBEDDING)):
            raise ConfigError(explain(self._asked, UNTIED, HOW_TO_TIE))

    def read_into(self, target: torch.Tensor, contents: LocalTensor) -> None:
        """Fills `target`, a rank's tensor of any dtype and device, according to `contents`. Raises ConfigError: a
        tensor is missing or has another shape."""
        target.zero_()
        for block in contents.blocks:
            place = target.narrow(block.dim, block.local, block.length)
            values = self._slice(block)
            if values.shape != place.shape:
                found = f"{block.name} has the shape {list(values.shape)} where {list(place.shape)} is due"
                raise self._unfit(found)
            place.copy_(values)

    def close(self) -> None:
        """Closes the files."""
        self._open.clear()

    def _slice(self, block: Block) -> torch.Tensor:
        stored, run = self._stored(block.name), slice(block.start, block.start + block.length)
        return stored[run] if block.dim == 0 else stored[:, run]

    def _whole(self, name: str) -> torch.Tensor:
        """In float32: the files may hold the two in different dtypes."""
        return self._stored(name)[:].float()

    def _stored(self, name: str) -> Any:
        """The tensor `name`, to be sliced. Raises ConfigError."""
        file = self._files.get(name)
        if file is None:
            raise self._unfit(f"it has no tensor {name}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise self._unfit(f"{file.name} cannot be read: {error}") from error

    def _find_files(self) -> dict[str, Path]:
        """Name of a tensor -> its file. Raises OSError, ValueError."""
        index = self._directory / _INDEX
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self._directory / file for name, file in named.items()}
        single = self._directory / _SINGLE
        if not single.is_file():
            raise FileNotFoundError(f"neither {_INDEX} nor {_SINGLE} in {self._directory}")
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except SafetensorError as error:
            raise ValueError(f"{single} cannot be read: {error}") from error

    def _unfit(self, found: str) -> ConfigError:
        return ConfigError(explain(self._asked, found, "name a whole model in Hugging Face format"))


def _directory(model: ModelConfig) -> Path:
    """Directory of the model's files; hub files are fetched unless cached. Raises OSError."""
    path = Path(model.path).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=["*.safetensors", "*.json"]))
