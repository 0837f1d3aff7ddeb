"""Training backends on a CPU, each a rank of as many as there are."""

from dataclasses import fields

import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import MegatronConfig, TrainerConfig
from asyncrl.trainer.trainer_spec import TrainerSpec


def trainer_spec(path, algorithm=None, *, dtype="float32", revision=None, **settings):
    """A rank that trains the model at `path`. `settings`: fields of the spec, and of its trainer."""
    own = {field.name: settings.pop(field.name) for field in fields(TrainerSpec) if field.name in settings}
    return TrainerSpec(
        model=ModelConfig(path=str(path), inference_dtype=dtype, revision=revision),
        trainer=TrainerConfig(**settings),
        algorithm=algorithm or AlgorithmConfig(),
        **own,
    )


def rank_spec(path, world_size, backend, layout=None, algorithm=None, **settings):
    """One of `world_size` ranks, as the tests of Megatron-core compare them with FSDP2."""
    ranks = {"backend": backend, "num_ranks": world_size, "megatron": layout or MegatronConfig()}
    usual = {"lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 2, "collective_timeout_s": 60, "temperature": 0.9}
    return trainer_spec(path, algorithm, **usual, **ranks, **settings)


def plain_backend(spec):
    from asyncrl_testing.plain_backend import PlainBackend

    return PlainBackend(spec)


def fsdp_backend(spec, rank=0, world_size=1):
    from asyncrl.trainer.fsdp.backend import FsdpBackend

    return FsdpBackend(spec, rank=rank, world_size=world_size, device=torch.device("cpu"))


def megatron_backend(spec, rank=0, world_size=1):
    from asyncrl.trainer.megatron.backend import MegatronBackend

    return MegatronBackend(spec, rank=rank, world_size=world_size, device=torch.device("cpu"))


def save(backend, directory):
    """A checkpoint of what it holds now; returns its directory."""
    backend.capture()
    backend.save(directory)
    return directory
