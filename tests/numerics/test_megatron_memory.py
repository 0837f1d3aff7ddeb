"""The memory that a dry run announces is what ranks of Megatron-core allocate; its tensors are those of the model."""

import json

import pytest

from asyncrl.config.algorithm import KlConfig
from asyncrl.config.trainer import MegatronConfig
from asyncrl.trainer.backends import memory_of
from asyncrl.trainer.model_tensors import model_tensors
from asyncrl.types import ModelFacts
from asyncrl_testing.rank_processes import run_ranks
from tests.backends import megatron_backend
from tests.make import needs_megatron
from tests.numerics.test_megatron_layouts import spec_of, write_models

pytestmark = needs_megatron

KINDS = ("qwen3", "qwen2", "llama", "mixture", "shared")
LAYOUTS = {
    "dp2": ("qwen3", MegatronConfig(), {}),
    "dp2-bf16-mixture": ("mixture", MegatronConfig(param_dtype="bfloat16"), {}),
    "tp2-bf16-reference": (
        "llama", MegatronConfig(tensor_parallel=2, param_dtype="bfloat16"), {"kl": KlConfig(coefficient=0.1)}
    ),
    "pp2-tied-critic": ("qwen3", MegatronConfig(pipeline_parallel=2), {"advantage": "gae"}),
    "vpp": ("qwen2", MegatronConfig(pipeline_parallel=2, chunks_per_stage=2), {}),
    "ep2": ("mixture", MegatronConfig(expert_parallel=2), {}),
    "tp2-ep2": ("shared", MegatronConfig(tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=1), {}),
}  # fmt: skip
"""Name -> model, layout on two ranks, algorithm."""


def rank_main(root, rank, world_size, paths):
    """(stage, bytes of weights, of gradients, of the optimizer) of this rank at each layout."""
    from megatron.core import parallel_state

    found = {}
    for name, (kind, layout, algorithm) in LAYOUTS.items():
        spec = spec_of(paths[kind], world_size, "megatron", layout, **algorithm)
        backend = megatron_backend(spec, rank, world_size)
        found[name] = parallel_state.get_pipeline_model_parallel_rank(), *allocated(backend._models)
        parallel_state.destroy_model_parallel()
    return found


def allocated(models):
    trained = [model for _, model in models.trained()]
    wrapped = [chunk for model in trained for chunk in model.chunks]
    frozen = models._reference._chunks if models._reference is not None else []
    weights = storages(p for chunk in [*wrapped, *frozen] for p in chunk.parameters())
    buffers = [buffer for chunk in wrapped for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    gradients = storages(buffer.grad_data for buffer in buffers)
    state = storages(
        tensor for model in trained for _, share in model.optimizer.shares() for tensor in share.state.values()
    )
    of_optimizer = {place: size for place, size in state.items() if place not in weights}
    return sum(weights.values()), sum(gradients.values()), sum(of_optimizer.values())


def storages(tensors):
    """Address -> bytes, of each piece of memory once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"), KINDS)


@pytest.fixture(scope="module")
def ranks(paths, tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    return run_ranks(rank_main, root, 2, paths, preload=["tests.numerics.megatron_ranks"], deadline_s=200)


def tensors_of(path):
    found = model_tensors(ModelFacts.of_config(str(path), json.loads((path / "config.json").read_text())))
    assert found is not None
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_allocate_what_was_announced(name, ranks, paths):
    kind, layout, algorithm = LAYOUTS[name]
    spec = spec_of(paths[kind], 2, "megatron", layout, **algorithm)
    needs = {"critic": spec.algorithm.needs_critic, "reference": spec.algorithm.needs_reference}
    announced = memory_of(spec.trainer, tensors_of(paths[kind]), **needs)
    assert announced is not None
    assert len(announced) == layout.pipeline_parallel
    for rank in ranks:
        stage, *found = rank[name]
        expected = announced[stage]
        for part, nbytes in zip(("weights", "gradients", "optimizer"), found, strict=True):
            assert getattr(expected, part) == pytest.approx(nbytes, rel=0.1), (part, found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_of_a_config_are_those_of_its_checkpoint(kind, paths):
    from safetensors import safe_open

    with safe_open(paths[kind] / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no dict
    assert tensors_of(paths[kind]) == shapes
