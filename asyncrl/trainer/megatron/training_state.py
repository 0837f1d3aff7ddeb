"""Megatron-core's checkpoints in one process: reads one as weights (`CheckpointReader`) and as `TrainingState`, and
writes one from another backend's state.

A converted checkpoint has each Hugging Face tensor as its own parameter, in files of limited size. Ranks of any layout
read it like a checkpoint of another layout. Imports no Megatron-core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from asyncrl.config.model import ModelConfig
from asyncrl.errors import StorageError, explain
from asyncrl.trainer.backend import WEIGHT, StoredAdapter, TensorKind, TrainingState
from asyncrl.trainer.megatron.names import Block, LocalTensor, dim_of
from asyncrl.trainer.megatron.sizes import ModelSizes
from asyncrl.trainer.megatron.stored_state import MASTER, TOTAL_STEPS, RankFiles, file_of, header, write_file
from asyncrl.weights.plan import runs_of

MAX_FILE_BYTES = 4 << 30
"""Largest file of a converted checkpoint, unless a single tensor with its moments is larger."""
_KINDS: dict[TensorKind, str] = {WEIGHT: MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Kind of a tensor -> its name in the files."""


class MegatronCheckpoint:
    """Reads the master weights (`CheckpointReader`), and all state (`TrainingState`)."""

    def __init__(self, directory: Path, config_of: object = None) -> None:
        """Raises ConfigError: there is no checkpoint below `directory`, or it cannot be read. `config_of`: not
        needed."""
        self._written = RankFiles(directory, f"read the trainer's state of {directory}")

    def weights(self, model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """See `CheckpointReader`."""
        for name in self._written.names("model"):
            yield name, self._written.whole("model", MASTER, name)

    def adapter(self) -> StoredAdapter | None:
        """None: this backend trains all weights."""
        return None

    def total_steps(self) -> int:
        """See `TrainingState`."""
        return self._number(TOTAL_STEPS)

    def steps(self, model: str) -> int:
        """See `TrainingState`."""
        return self._number(model)

    def shapes(self, model: str) -> dict[str, tuple[int, ...]]:
        """See `TrainingState`."""
        return self._written.shapes(model)

    def read(self, model: str, name: str, kind: TensorKind) -> torch.Tensor:
        """See `TrainingState`."""
        return self._written.whole(model, _KINDS[kind], name)

    def _number(self, name: str) -> int:
        found = self._written.numbers.get(name)
        if type(found) is not int:
            raise self._written.unfit(f"it has no number {name}")
        return found


def write_training_state(
    directory: Path,
    state: TrainingState,
    configs: Mapping[str, Mapping[str, Any]],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """See `backends.write_training_state`."""
    numbers = {TOTAL_STEPS: state.total_steps()}
    for model, config in configs.items():
        numbers[model] = state.steps(model)
        sizes = ModelSizes.of_config(config).fingerprint()
        numbers.update((f"{model}.{size}", value) for size, value in sizes.items())
    whole = [(model, name, shape) for model in configs for name, shape in state.shapes(model).items()]
    files = list(runs_of(whole, lambda each: prod(each[2]) * torch.float32.itemsize * len(_KINDS), max_file_bytes))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number, inside in enumerate(files):
            parameters = {f"{model}.{name}": _whole(name, shape) for model, name, shape in inside}
            tensors = {
                f"{model}.{name}.{key}": state.read(model, name, kind).flatten()
                for model, name, _ in inside
                for kind, key in _KINDS.items()
            }
            described = header(number, len(files), numbers, parameters, converted=True)
            write_file(file_of(directory, number), described, tensors)
    except (OSError, SafetensorError) as error:
        do = "make room there, or name another directory"
        raise StorageError(explain(f"write the trainer's state to {directory}", str(error), do)) from error


def _whole(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int, LocalTensor]:
    """A parameter description for `header`: one whole tensor."""
    dim = dim_of(name)
    return shape, 0, prod(shape), LocalTensor((Block(name, dim, 0, 0, shape[dim]),), False, dim)
