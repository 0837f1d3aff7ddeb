"""FSDP2's checkpoints in one process: reads one as weights and adapters (`CheckpointReader`) and as `TrainingState`,
and writes one from another backend's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from asyncrl.config.model import ModelConfig
from asyncrl.trainer.backend import MODELS, MOMENTS, WEIGHT, StoredAdapter, TensorKind, TrainingState
from asyncrl.trainer.fsdp import lora
from asyncrl.trainer.fsdp.sharded_state import TOTAL_STEPS, save
from asyncrl.trainer.fsdp.stored_state import StoredState
from asyncrl.weights.encodings.base import BaseWeights
from asyncrl.weights.encodings.lora import LORA_B
from asyncrl.weights.stored_layout import StoredLayout, StoredPart

_OPTIMIZERS = {"model": "optimizer", "critic": "critic_optimizer"}
"""Model -> prefix of its optimizer's entries."""
_STEP = "step"
_CACHED = 6
"""Cached tensors: gate-and-up and down projections of one layer's experts, of three kinds."""


class FsdpCheckpoint:
    """Reads weights and adapters."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError: there is no checkpoint below `directory`, or it cannot be read."""
        self._written = StoredState(directory, f"read the weights of {directory}")
        self._names = [name.removeprefix("model.") for name in self._written.entries if name.startswith("model.")]

    def weights(self, model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """See `CheckpointReader`."""
        adapter, layout = self.adapter(), StoredLayout.of_model(model)
        if adapter is None:
            for name in self._names:
                yield from layout.split(name, self._written.read(f"model.{name}"))
            return
        scaled = {
            layout.of_factor(name): t * adapter.scale if name.endswith(LORA_B) else t
            for name, t in adapter.tensors.items()
        }
        for name, tensor in BaseWeights(model.path, model.revision).merged(scaled):
            yield name, tensor.float()

    def adapter(self) -> StoredAdapter | None:
        """See `CheckpointReader`."""
        written = self._written
        if lora.SCALE not in written:
            return None
        try:
            scale, base = float(written.read(lora.SCALE)), bytes(written.read(lora.BASE).tolist()).decode()
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise written.unfit(f"{lora.SCALE} and {lora.BASE} are none of a run with adapters: {error}") from error
        tensors = {name: written.read(f"model.{name}") for name in self._names}
        if not any(".lora_A." in name for name in tensors):
            raise written.unfit("it has no adapter")
        return StoredAdapter(scale, base, tensors)


class FsdpTrainingState:
    def __init__(self, directory: Path, config_of: Callable[[str], Mapping[str, Any]]) -> None:
        """`config_of`: the Hugging Face config of each model. Raises ConfigError: there is no checkpoint below
        `directory`, it cannot be read, or it holds adapters only."""
        self._written = StoredState(directory, f"convert {directory}")
        if lora.SCALE in self._written:
            do = "start a new run from what asyncrl-export without --to makes of it: a model with the adapters merged"
            found = "it holds adapters alone (trainer.lora), which the other backend does not train"
            raise self._written.unfit(found, do)
        self._parts = {model: self._parts_of(model, config_of) for model in MODELS}
        self._read_entry = lru_cache(_CACHED)(self._written.read)

    def total_steps(self) -> int:
        """See `TrainingState`."""
        if TOTAL_STEPS not in self._written or self._written.shape(TOTAL_STEPS):
            raise self._written.unfit(f"it has no number {TOTAL_STEPS}")
        return int(self._written.read(TOTAL_STEPS))

    def steps(self, model: str) -> int:
        """See `TrainingState`."""
        prefix = f"{_OPTIMIZERS[model]}."
        counts = {n: torch.empty(()) for n in self._written.entries if n.startswith(prefix) and n.endswith(f".{_STEP}")}
        if any(self._written.shape(name) for name in counts):
            raise self._written.unfit(f"the steps of {prefix[:-1]} are no numbers")
        self._written.read_into(counts, alone=True)
        found = {int(count) for count in counts.values()}
        if len(found) != 1:
            raise self._written.unfit(f"the tensors of the {model} have made {sorted(found)} steps: one number is due")
        return found.pop()

    def shapes(self, model: str) -> dict[str, tuple[int, ...]]:
        """See `TrainingState`."""
        return {name: part.shape for name, (_, part) in self._parts[model].items()}

    def read(self, model: str, name: str, kind: TensorKind) -> torch.Tensor:
        """See `TrainingState`."""
        inside, part = self._parts[model][name]
        entry = f"{model}.{inside}" if kind == WEIGHT else f"{_OPTIMIZERS[model]}.{inside}.{kind}"
        if entry not in self._written or self._written.shape(entry) != self._written.shape(f"{model}.{inside}"):
            raise self._written.unfit(f"it has no {entry} in the shape of the weight")
        return part.of(self._read_entry(entry)).float().clone()  # independent of the cache

    def _parts_of(self, model: str, config_of: Callable[[str], Mapping[str, Any]]) -> dict[str, tuple[str, StoredPart]]:
        """Name in the files -> (name in the checkpoint, place in it)."""
        entries = [name.removeprefix(f"{model}.") for name in self._written.entries if name.startswith(f"{model}.")]
        if not entries:
            return {}
        layout = StoredLayout.of_config(config_of(model))
        return {
            part.name: (inside, part)
            for inside in entries
            for part in layout.parts_of(_outside(model, inside), self._written.shape(f"{model}.{inside}"))
        }


def write_training_state(directory: Path, state: TrainingState, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """See `backends.write_training_state`."""
    shapes: dict[str, tuple[int, ...]] = {}
    sources: dict[str, Any] = {}
    ready: dict[str, torch.Tensor] = {TOTAL_STEPS: torch.tensor(state.total_steps(), dtype=torch.int64)}
    for model, config in configs.items():
        optimizer, steps = _OPTIMIZERS[model], float(state.steps(model))
        layout, own = StoredLayout.of_config(config), state.shapes(model)
        known = {part.name for name in layout.wholes for part in layout.parts[name]}
        whole = {name: shape for name, shape in layout.wholes.items() if layout.parts[name][0].name in own}
        # Only shapes are known here: a tensor is read and joined when it is written.
        for name, shape in (whole | {name: own[name] for name in own if name not in known}).items():
            inside = _inside(model, name)
            for kind in (WEIGHT, *MOMENTS):
                entry = f"{model}.{inside}" if kind == WEIGHT else f"{optimizer}.{inside}.{kind}"
                shapes[entry] = shape
                sources[entry] = partial(layout.joined, name, partial(state.read, model, kind=kind))
            ready[f"{optimizer}.{inside}.{_STEP}"] = torch.tensor(steps)
    save(directory, ready | {n: torch.empty(s, device="meta") for n, s in shapes.items()}, None, _WhenWritten(sources))


class _WhenWritten(dcp.DefaultSavePlanner):
    """Plans with shapes only, and makes each tensor when it is written."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        super().__init__()
        self._sources = sources

    def lookup_object(self, index: Any) -> Any:
        source = self._sources.get(index.fqn)
        return super().lookup_object(index) if source is None else source()


def _outside(model: str, name: str) -> str:
    """Hugging Face name of the tensor that `model` calls `name`: a critic's layers are its backbone's."""
    return name.replace("backbone.", "model.", 1) if model == "critic" else name


def _inside(model: str, name: str) -> str:
    return name.replace("model.", "backbone.", 1) if model == "critic" and name.startswith("model.") else name
