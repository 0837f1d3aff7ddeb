"""The TrainBackend of Megatron-core."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.host_copies import Captures
from asyncrl.trainer.megatron import stored_state
from asyncrl.trainer.megatron.stored_state import RankFiles
from asyncrl.trainer.megatron.supports import require_package, without_wandb
from asyncrl.trainer.step.loop import TrainingStep
from asyncrl.trainer.step.model import Peers
from asyncrl.trainer.trainer_spec import TrainerSpec

if TYPE_CHECKING:
    from asyncrl.trainer.megatron.models import MegatronModels
    from asyncrl.trainer.megatron.publication import BlockPublication

F = TypeVar("F", bound=Callable[..., Any])


class MegatronBackend:
    """One rank. Needs torch.distributed's default group, over all ranks. Owns the models, their optimizers and the
    captured copy of their state; `TrainingStep` makes the step.

    On a machine without CUDA every method that calls Megatron-core does so inside `cpu.cuda_as_cpu`.
    """

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int, device: torch.device) -> None:
        """Loads this rank's part of the models; collective. Raises ConfigError: a model cannot be read or trained."""
        require_package()
        if spec.trainer.megatron.layers == "transformer_engine" and device.type != "cuda":
            found, do = f"this rank trains on {device}", "set trainer.megatron.layers=local, or train on GPUs"
            raise ConfigError(explain("trainer.megatron.layers=transformer_engine", found, do))
        self._spec, self._rank, self._world_size = spec, rank, world_size
        on_device = _on_device(device)
        self._models, step, publication = on_device(_build)(spec, device)
        self.train_step, self.logprobs = on_device(step.train_step), on_device(step.logprobs)
        self.reference_kl = on_device(step.reference_kl)
        self.weight_specs, self.sending_ranks = publication.specs, publication.senders
        self.named_weights = publication.tensors
        self._captures = Captures()

    def capture(self) -> None:
        numbers, parameters, live = {stored_state.TOTAL_STEPS: self._spec.total_steps}, {}, {}
        for model_name, model in self._models.trained():
            numbers[model_name] = model.optimizer.steps()
            numbers.update((f"{model_name}.{size}", value) for size, value in model.sizes.fingerprint().items())
            for name, parameter, share, contents in model.shares():
                key = f"{model_name}.{name}"
                parameters[key] = (list(parameter.shape), share.start, share.stop, contents)
                live.update((f"{key}.{kind}", tensor.detach()) for kind, tensor in share.state.items())
        header = stored_state.header(self._rank, self._world_size, numbers, parameters)
        self._captures.take(stored_state.with_random_state(live), header)

    def save(self, directory: Path) -> tuple[str, ...]:
        """See `TrainBackend`. Raises StorageError: it cannot be written there."""
        self._captures.write(partial(stored_state.write, directory))
        return (stored_state.file_of(directory, self._rank).name,)

    def load(self, directory: Path) -> None:
        """Raises ConfigError: there is no checkpoint below `directory`, or it is of another model."""
        written = RankFiles(directory, f"load the trainer's state from {directory}")
        models = self._models.trained()
        for model_name, model in models:
            model.check_same(written, model_name)
        if self._rank == 0 and stored_state.TOTAL_STEPS in written.numbers:
            self._spec.warn_of_another_length(written.numbers[stored_state.TOTAL_STEPS])
        for model_name, model in models:
            model.load_state(written, model_name)
        if written.world_size == self._world_size and (random_state := written.random_state(self._rank)) is not None:
            torch.set_rng_state(random_state)


def _on_device(device: torch.device) -> Callable[[F], F]:
    """Returns a decorator of functions in which Megatron-core computes on `device`."""
    if device.type == "cuda":
        return lambda function: function
    from asyncrl.trainer.megatron import cpu

    cpu.import_megatron()
    return cpu.cuda_as_cpu()


def bind_gemm() -> None:
    """Megatron-core leaves this name unbound without TransformerEngine, and its routers in float32 read it. On a CPU
    after `_on_device`."""
    with without_wandb():
        utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None


def _build(spec: TrainerSpec, device: torch.device) -> tuple[MegatronModels, TrainingStep, BlockPublication]:
    """Collective. Imports Megatron-core, which on a CPU must happen after `_context`."""
    bind_gemm()
    with without_wandb():
        from asyncrl.trainer.megatron.model import join_groups
        from asyncrl.trainer.megatron.models import MegatronModels
        from asyncrl.trainer.megatron.publication import BlockPublication

    groups = join_groups(spec.trainer)
    models = MegatronModels(spec, groups, on_cpu=device.type == "cpu")
    step = TrainingStep(spec, models.of_step(), peers=Peers(groups.data), device=device)
    stages = spec.trainer.megatron.pipeline_parallel
    return models, step, BlockPublication(models.policy.parameters, spec.model.inference_dtype, stages)
