"""The training state of a checkpoint, independent of the backend that wrote it; conversion reads and writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

TensorKind = Literal["weight", "exp_avg", "exp_avg_sq"]
WEIGHT: TensorKind = "weight"
MOMENTS: tuple[TensorKind, ...] = ("exp_avg", "exp_avg_sq")
MODELS = ("model", "critic")
"""The models that a checkpoint may hold."""


class TrainingState(Protocol):
    """Weights, moments and step counts that one backend's `save` wrote, read in one process and without a process
    group. Tensors have Hugging Face names, experts separate; a critic's head is `head.weight` and `head.bias`."""

    def total_steps(self) -> int:
        """Length of the run. Raises ConfigError: it cannot be read."""
        ...

    def steps(self, model: str) -> int:
        """Number of steps of the optimizer of `model`. Raises ConfigError: it cannot be read."""
        ...

    def shapes(self, model: str) -> dict[str, tuple[int, ...]]:
        """The tensors of `model`, in the best order for reading; empty if there is no such model."""
        ...

    def read(self, model: str, name: str, kind: TensorKind) -> torch.Tensor:
        """A whole tensor, float32. Raises ConfigError: it cannot be read."""
        ...


WriteTrainingState = Callable[[Path, TrainingState, Mapping[str, Mapping[str, Any]]], None]
"""(directory, state, configs): writes `state` so that the backend's `load` reads it with any number of ranks. Reads a
few tensors at a time.

`directory` does not exist, or is empty. `configs`: the Hugging Face config of each model of `state`, with a value for
every key.

Raises ConfigError: `state` cannot be read; StorageError: `directory` cannot be written.
"""
