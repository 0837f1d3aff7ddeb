"""The training backends by name: everything that the rest of the package knows before a backend is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from asyncrl.config.trainer import TrainerConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.model_tensors import RankMemory, Shape, layer_of

if TYPE_CHECKING:
    import torch

    from asyncrl.trainer.backend import CheckpointReader, TrainBackend, TrainingState
    from asyncrl.trainer.trainer_spec import TrainerSpec
    from asyncrl.types import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """One training backend, described without importing it."""

    backend: str
    """`package.module:Class` of the `TrainBackend`; called with (spec, rank=, world_size=, device=)."""
    reader: str
    """`package.module:Class` of the `CheckpointReader`; called with the trainer directory of a checkpoint."""
    unsupported: str
    """`package.module:function`; called with ModelFacts; returns the features of the model that the backend would train
    wrongly. The module imports no torch."""
    works: str
    """Advice for a model that the backend does not support."""
    marker: str
    """File that only this backend writes into a trainer directory."""
    state: str
    """`package.module:Class` of the `TrainingState`; called with the trainer directory of a checkpoint."""
    write_state: str
    """`package.module:function`; see `write_training_state`."""
    layout: str
    """`package.module:function`; called with (TrainerConfig, ModelFacts, key of the model); raises ConfigError if the
    ranks do not divide the model. The module imports no torch."""
    memory: str
    """`package.module:function`; see `memory_of`. The module imports no torch."""
    stage: str = ""
    """`package.module:function`; called with (name of a tensor, TrainerConfig, number of layers); returns the pipeline
    stage that sends it. The module imports no torch. Empty: one stage."""
    package: str = ""
    """`package.module:function`; raises ConfigError if a package is missing. The module imports no torch."""


BACKENDS: dict[str, BackendSpec] = {
    "fsdp": BackendSpec(
        backend="asyncrl.trainer.fsdp.backend:FsdpBackend",
        reader="asyncrl.trainer.fsdp.training_state:FsdpCheckpoint",
        unsupported="asyncrl.trainer.fsdp.supports:unsupported",
        works="train a decoder-only model of text such as Qwen2, Qwen3 (also MoE) or Llama",
        marker=".metadata",
        state="asyncrl.trainer.fsdp.training_state:FsdpTrainingState",
        write_state="asyncrl.trainer.fsdp.training_state:write_training_state",
        layout="asyncrl.trainer.fsdp.supports:check_layout",
        memory="asyncrl.trainer.fsdp.memory:rank_memory",
    ),
    "megatron": BackendSpec(
        backend="asyncrl.trainer.megatron.backend:MegatronBackend",
        reader="asyncrl.trainer.megatron.training_state:MegatronCheckpoint",
        unsupported="asyncrl.trainer.megatron.supports:unsupported",
        works="train Llama, Qwen2, Qwen3, Qwen2-MoE or Qwen3-MoE, or set trainer.backend=fsdp",
        marker="rank00000.safetensors",
        state="asyncrl.trainer.megatron.training_state:MegatronCheckpoint",
        write_state="asyncrl.trainer.megatron.training_state:write_training_state",
        layout="asyncrl.trainer.megatron.supports:check_layout",
        memory="asyncrl.trainer.megatron.memory:rank_memory",
        stage="asyncrl.trainer.megatron.memory:stage_of",
        package="asyncrl.trainer.megatron.supports:require_package",
    ),
}


def build_backend(spec: TrainerSpec, *, rank: int, world_size: int, device: torch.device) -> TrainBackend:
    """The backend of `spec` on this rank; collective. Raises ConfigError: a model cannot be read or trained."""
    build = resolve_name(BACKENDS[spec.trainer.backend].backend)
    return build(spec, rank=rank, world_size=world_size, device=device)


def require_trains(backend: str, facts: ModelFacts, key: str = "model.path") -> None:
    """Raises ConfigError: the backend would train the model at `key` wrongly, or not at all."""
    spec = BACKENDS[backend]
    if facts.quantization:
        found = f"its files hold quantised weights ({facts.quantization}), and trainer ranks load weights as they are"
        do = "name the model that was quantised; rollout.vllm.quantization quantises what replicas serve of the policy"
        raise ConfigError(explain(facts.name.replace("model.path", key, 1), found, do))
    if problems := resolve_name(spec.unsupported)(facts):
        asked = f"train {facts.name.replace('model.path', key, 1)} with trainer.backend={backend}"
        raise ConfigError(explain(asked, f"the backend does not support {', '.join(problems)}", spec.works))


def require_fits(trainer: TrainerConfig, facts: ModelFacts, key: str = "model.path") -> None:
    """Raises ConfigError: the layout of the trainer's ranks does not divide the model at `key`."""
    resolve_name(BACKENDS[trainer.backend].layout)(trainer, facts, key)


def memory_of(trainer: TrainerConfig, tensors: Mapping[str, Shape], **needs: Any) -> list[RankMemory]:
    """Memory of each kind of rank.

    Args:
        tensors: of the policy; critic and reference resemble it.
        needs: `critic` and `reference`: there is one. `own_reference`: it is another model than the policy's base.
            `tokens`: of the largest micro-batch, to include the memory of its passes; None: leave it out.
            `experts_per_token`. All are optional.
    """
    return resolve_name(BACKENDS[trainer.backend].memory)(trainer, tensors, **needs)


def stages_of(trainer: TrainerConfig, tensors: Mapping[str, Shape]) -> dict[str, int]:
    """The pipeline stage that sends each tensor."""
    stage, num_layers = BACKENDS[trainer.backend].stage, 1 + max(layer_of(name) or 0 for name in tensors)
    return {name: resolve_name(stage)(name, trainer, num_layers) if stage else 0 for name in tensors}


def require_backend(backend: str) -> None:
    """Raises ConfigError: a package that the backend needs is not installed."""
    if check := BACKENDS[backend].package:
        resolve_name(check)()


def written_by(directory: Path) -> str | None:
    """The backend that wrote the trainer directory of a checkpoint; None: no known backend."""
    return next((name for name, spec in BACKENDS.items() if (directory / spec.marker).exists()), None)


def require_written_by(backend: str, directory: Path) -> None:
    """Raises ConfigError: another backend wrote the trainer directory of a checkpoint. An unknown writer passes."""
    if (other := written_by(directory)) in (None, backend):
        return
    do = (
        f"set trainer.backend={other}, or convert it: asyncrl-export {directory.parent} NEW_RUN --to {backend}, "
        "and go on with run.dir=NEW_RUN resume=auto"
    )
    raise ConfigError(explain(f"resume from {directory} with trainer.backend={backend}", f"it is of {other}", do))


def open_training_state(directory: Path, config_of: Callable[[str], Mapping[str, Any]]) -> TrainingState:
    """`config_of`: the Hugging Face config of each model.

    Raises ConfigError: there is no checkpoint of a backend, or it cannot be read.
    """
    backend = written_by(directory)
    if backend is None:
        do = "name a run, or runs/NAME/checkpoints/step_N"
        raise ConfigError(explain(f"convert {directory}", "it is of no backend known here", do))
    return resolve_name(BACKENDS[backend].state)(directory, config_of)


def write_training_state(
    to: str, directory: Path, state: TrainingState, configs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Writes `state` so that the `load` of backend `to` reads it with any number of ranks. Reads a few tensors at a
    time.

    Args:
        directory: does not exist, or is empty.
        configs: the Hugging Face config of each model of `state`, with a value for every key.

    Raises:
        ConfigError: `state` cannot be read.
        StorageError: `directory` cannot be written.
    """
    resolve_name(BACKENDS[to].write_state)(directory, state, configs)


def open_checkpoint(directory: Path, backend: object = None) -> CheckpointReader:
    """Opens the trainer directory of a checkpoint.

    Args:
        backend: `trainer.backend` of the run's recipe, which is untrusted input; None: unknown, take the default.

    Raises:
        ConfigError: no backend has that name, or it wrote no checkpoint there.
    """
    name = TrainerConfig().backend if backend is None else backend
    if not isinstance(name, str) or name not in BACKENDS:
        found = f"its recipe names trainer.backend={name}, and the backends here are {', '.join(BACKENDS)}"
        raise ConfigError(explain(f"read {directory}", found, "read it with the version of asyncrl that wrote it"))
    return resolve_name(BACKENDS[name].reader)(directory)
