"""Reads a model in Hugging Face format; each rank reads only the slices that it holds."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.megatron.names import Block, LocalTensor
from asyncrl.trainer.megatron.sizes import ModelSizes
from asyncrl.trainer.megatron.supports import unsupported
from asyncrl.types import HOW_TO_TIE, UNTIED, ModelFacts
from asyncrl.weights.encodings.base import open_files

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class PretrainedModel:
    """The files of `model.path`, mapped while this object lives."""

    def __init__(self, model: ModelConfig, key: str = "model.path") -> None:
        """Reads the config and the headers of the files.

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
            self._files = open_files(model.path, model.revision)
            if not self._files:
                raise FileNotFoundError("no *.safetensors in it")
        except (OSError, ValueError) as error:
            do = "name a directory or hub name of a causal LM with *.safetensors files"
            raise ConfigError(explain(self._asked, str(error), do)) from error
        if problems := unsupported(ModelFacts.of_config(model.path, config)):
            found = f"the backend does not support {', '.join(problems)}"
            asked = f"{self._asked} with trainer.backend=megatron"
            raise ConfigError(explain(asked, found, "set trainer.backend=fsdp"))
        self.sizes = ModelSizes.of_config(config)
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

    def _slice(self, block: Block) -> torch.Tensor:
        stored, run = self._stored(block.name), slice(block.start, block.start + block.length)
        return stored[run] if block.dim == 0 else stored[:, run]

    def _whole(self, name: str) -> torch.Tensor:
        """In float32: the files may hold the two in different dtypes."""
        return self._stored(name)[:].float()

    def _stored(self, name: str) -> Any:
        """The tensor `name`, to be sliced. Raises ConfigError."""
        if name not in self._files:
            raise self._unfit(f"it has no tensor {name}")
        return self._files[name].get_slice(name)

    def _unfit(self, found: str) -> ConfigError:
        return ConfigError(explain(self._asked, found, "name a whole model in Hugging Face format"))
