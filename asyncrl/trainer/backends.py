"""The training backends that `trainer.backend` can name. Importing this imports none of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.trainer import TrainerConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.registry import load

if TYPE_CHECKING:
    import torch

    from asyncrl.trainer.backend import CheckpointReader, TrainBackend
    from asyncrl.trainer.trainer_spec import TrainerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """Both as `package.module:Name`."""

    trains: str
    """Class of the `TrainBackend`, built with (spec, rank=, world_size=, device=)."""
    reads: str
    """Class of the `CheckpointReader`, built with the trainer directory of a checkpoint."""


BACKENDS = {
    "fsdp": BackendSpec(
        trains="asyncrl.trainer.fsdp.backend:FsdpBackend", reads="asyncrl.trainer.fsdp.checkpoint_reader:FsdpCheckpoint"
    )
}


def build_backend(spec: TrainerSpec, *, rank: int, world_size: int, device: torch.device) -> TrainBackend:
    """The backend of `spec` on this rank; collective. Raises ConfigError: a model cannot be read or trained."""
    build = load(BACKENDS[spec.trainer.backend].trains)
    return build(spec, rank=rank, world_size=world_size, device=device)


def open_checkpoint(directory: Path, backend: object = None) -> CheckpointReader:
    """Opens the trainer directory of a checkpoint.

    Args:
        backend: `trainer.backend` as the run's recipe has it, which anybody may have written; None: it is not known,
            and the default is taken.

    Raises:
        ConfigError: no backend has that name, or there is no checkpoint that it wrote.
    """
    name = TrainerConfig().backend if backend is None else backend
    if not isinstance(name, str) or name not in BACKENDS:
        found = f"its recipe names trainer.backend={name}, and the backends here are {', '.join(BACKENDS)}"
        raise ConfigError(explain(f"read {directory}", found, "read it with the version of asyncrl that wrote it"))
    return load(BACKENDS[name].reads)(directory)
