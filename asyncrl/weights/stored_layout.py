"""How a model's tensors are named and cut in the files of its checkpoint, by transformers' own conversion. A model may
fuse what the files keep apart (the experts of a layer), or name it otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from asyncrl.config.model import ModelConfig
from asyncrl.errors import ConfigError, WeightTransferError, explain
from asyncrl.types import auto_class, drop_towers, on_meta
from asyncrl.weights.encodings.base import BaseWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of the files, as a view of one of the model: `strides` and `offset` in elements of it."""

    name: str
    shape: Shape
    strides: Shape
    offset: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """`whole`: contiguous, or ValueError is raised."""
        if not whole.is_contiguous():
            raise ValueError(f"the parts of {self.name} are places in contiguous memory")
        return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """Tensors of the model's `state_dict` -> their parts in the files.

    Attributes:
        parts: by name in the model, tied tensors under each of their names.
        wholes: shapes by name in the model; a tied tensor once, under its first name.
        aliases: names in the files of tied tensors -> their first name there.
        exact: names in the files of tensors that they keep in float32 among 16-bit ones. Empty where the files were
            not read.
    """

    parts: Mapping[str, tuple[StoredPart, ...]]
    wholes: Mapping[str, Shape]
    aliases: Mapping[str, str]
    exact: frozenset[str] = frozenset()

    @staticmethod
    def of(model: PreTrainedModel) -> StoredLayout:
        """Of a loaded model, or one on the meta device. Raises ConfigError: the files join what the model keeps
        apart."""
        state = model.state_dict(keep_vars=True)
        parts = {name: tuple(_parts(model, name, tuple(t.shape))) for name, t in state.items()}
        first: dict[int, str] = {}
        for name, tensor in state.items():
            first.setdefault(id(tensor), name)
        aliases = {
            part.name: own.name
            for name, tensor in state.items()
            for part, own in zip(parts[name], parts[first[id(tensor)]], strict=True)
            if part.name != own.name
        }
        return StoredLayout(parts, {name: tuple(state[name].shape) for name in first.values()}, aliases)

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> StoredLayout:
        """`config`: the object in config.json."""
        from transformers import AutoConfig

        return StoredLayout.of(on_meta(AutoConfig.for_model(**config)))

    @staticmethod
    def of_model(model: ModelConfig) -> StoredLayout:
        """Reads the config, and the headers of files that are there where a prefix of their names depends on them.
        Raises ConfigError: transformers cannot build the model."""
        from transformers import AutoConfig
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        trust = model.trust_remote_code
        hub: Any = {"revision": model.revision, "trust_remote_code": trust}
        try:
            config = AutoConfig.from_pretrained(model.path, **hub)
            found = on_meta(config, trust_remote_code=trust)
            if any(isinstance(rule, PrefixChange) for rule in get_model_conversion_mapping(found)):
                where = {"device_map": "meta", "local_files_only": True}
                found = auto_class(config).from_pretrained(model.path, **where, **hub)
                drop_towers(found)
        except Exception as error:
            do = "name a causal LM that the installed transformers knows"
            raise ConfigError(explain(f"the tensors of model.path={model.path}", str(error), do)) from error
        return StoredLayout.of(found)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Name in the files -> shape; a tied tensor once."""
        return {part.name: part.shape for name in self.wholes for part in self.parts[name]}

    def parts_of(self, name: str, shape: Shape) -> tuple[StoredPart, ...]:
        """Of a tensor that is not the model's (a critic's head): itself. Raises ConfigError: the model's is not of
        `shape`."""
        if (own := self.wholes.get(name, shape)) != shape:
            found = f"it is {list(shape)}, and {list(own)} by the model's config"
            do = "pass --model DIRECTORY, the model that was trained"
            raise ConfigError(explain(f"the tensor {name}", found, do))
        if name in self.parts:
            return self.parts[name]
        strides = torch.empty(shape, device="meta").stride()
        return (StoredPart(name, shape, strides, 0),)

    def split(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the files, view of `tensor`) of each part. `tensor`: contiguous."""
        for part in self.parts_of(name, tuple(tensor.shape)):
            yield part.name, part.of(tensor)

    def joined(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The model's tensor; `read` returns a part by its name."""
        if name not in self.parts:
            return read(name)
        whole: torch.Tensor | None = None
        for part in self.parts[name]:
            values = read(part.name)
            whole = values.new_empty(self.wholes[name]) if whole is None else whole
            part.of(whole).copy_(values)
        assert whole is not None, "every tensor has a part"
        return whole

    def of_factor(self, name: str) -> str:
        """Name of an adapter's factor after its layer's weight in the files. Raises ConfigError: they cut that."""
        stem, kind, end = name.partition(".lora_")
        parts = self.parts.get(f"{stem}.weight", ())
        if len(parts) != 1:
            found, do = f"its files hold its weight in {len(parts)} parts", "name other trainer.lora.target_modules"
            raise ConfigError(explain(f"an adapter of {stem}", found, do))
        return parts[0].name.removesuffix(".weight") + kind + end


def stored_layout(model: PreTrainedModel, config: ModelConfig) -> StoredLayout:
    """The layout of a model whose weights were loaded from `config.path`. Raises ConfigError: the files lack a tensor
    that a publish would have, or hold it in another shape."""
    layout = StoredLayout.of(model)
    try:
        files = BaseWeights(config.path, config.revision)
    except WeightTransferError:  # other files than safetensors have no headers
        return layout
    aliases = {first: alias for alias, first in layout.aliases.items()}
    found = {name: files.shape(name) for name in files.names}
    for name, shape in layout.shapes.items():
        stored = found.get(name) or found.get(aliases.get(name, name))
        if stored != shape:
            said = f"they hold {list(stored)}" if stored else "they have no such tensor"
            do = "save the model again with transformers' save_pretrained"
            raise ConfigError(explain(f"publish {name} {list(shape)} as the files of {config.path} name it", said, do))
    return replace(layout, exact=files.exact)


class _WithoutCopies(TorchFunctionMode):
    """The conversion makes each part contiguous. Left as it is, a part tells where it lies in the model's tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _parts(model: PreTrainedModel, name: str, shape: Shape) -> Iterator[StoredPart]:
    from transformers.core_model_loading import revert_weight_conversion

    whole = torch.empty(shape, dtype=torch.uint8, device="cpu")  # never touched, so it takes no memory
    with _WithoutCopies():
        parts = revert_weight_conversion(model, {name: whole})
    for stored, part in parts.items():
        if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            found, do = f"the files of a {type(model).__name__} keep {name} joined with others", "train another model"
            raise ConfigError(explain("the tensors of a publish", found, do))
        yield StoredPart(stored, tuple(part.shape), tuple(part.stride()), int(part.storage_offset()))
