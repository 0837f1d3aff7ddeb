"""Several copies of a model, each sharded over some of the ranks; gradients reduced once an update; frozen weights in
the dtype of the passes. Four ranks (gloo) against one."""

import datetime
from dataclasses import asdict

import pytest
import torch
from transformers import Qwen3ForCausalLM

from asyncrl.config.trainer import FsdpConfig, LoraConfig, TrainerConfig
from asyncrl_testing.backend_suite import random_lease, weights_of
from asyncrl_testing.rank_processes import run_ranks
from tests.numerics.test_fsdp_ranks import assert_close_metrics, assert_close_weights, build, uneven

pytestmark = pytest.mark.usefixtures("process_group")

RANKS, DEADLINE_S = 4, 240
LEASES = [random_lease(60 + step, step=step) for step in range(3)]
BUDGET = 32
"""Of tokens: several micro-batches on each rank."""
LAYOUTS = {
    "two copies of two ranks": FsdpConfig(shard_ranks=2),
    "four copies": FsdpConfig(shard_ranks=1),
    "reduced once": FsdpConfig(reduce_every_microbatch=False),
    "two copies, reduced once": FsdpConfig(shard_ranks=2, reduce_every_microbatch=False, reshard_after_forward=False),
}
SHARDS = {"two copies of two ranks": 2, "four copies": 1, "reduced once": 4, "two copies, reduced once": 2}
SAVED = "two copies of two ranks"


def train(backend, leases, rank, world_size):
    plans = [lease.plans(world_size, BUDGET)[rank] for lease in leases]
    assert min(len(update) for plan in plans for update in plan.updates) > 1, "there is something to accumulate"
    return [asdict(backend.train_step(plan, lease.trajectories)) for plan, lease in zip(plans, leases, strict=True)]


def rank_main(root, rank, world_size, path):
    found = {}
    for name, fsdp in LAYOUTS.items():
        backend = build(path, rank, world_size, fsdp)
        if fsdp.shard_ranks not in (None, world_size):
            groups = [backend._models._mesh.get_group(name) for name in ("copies", "shards")]
            waits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
            wanted = datetime.timedelta(seconds=TrainerConfig().collective_timeout_s)
            assert waits == [wanted, wanted], "not torch's own"
        held = sum(p.to_local().numel() for p in backend._policy.causal_lm.parameters())
        found[name] = {
            "held": held,
            "steps": train(backend, LEASES[:2], rank, world_size),
            "weights": weights_of(backend),
        }
        if name == SAVED:
            backend.capture()
            files = backend.save(path.parent / "saved")
            found["files"] = sorted(files)
            found["last"] = train(backend, LEASES[2:], rank, world_size)
            found["last_weights"] = weights_of(backend)
    resumed = build(path, rank, world_size, LAYOUTS["reduced once"])
    resumed.load(path.parent / "saved")
    found["resumed"] = train(resumed, LEASES[2:], rank, world_size)
    found["resumed_weights"] = weights_of(resumed)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("copies") / "model"
    Qwen3ForCausalLM(uneven(tie_word_embeddings=False)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def four(model):
    root, preload = model.parent / "ranks", ["tests.numerics.test_fsdp_ranks"]
    return run_ranks(rank_main, root, RANKS, model, preload=preload, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_rank_does(model, four, name):
    one = build(model, 0, 1)
    for expected, found in zip(train(one, LEASES[:2], 0, 1), four[0][name]["steps"], strict=True):
        assert_close_metrics(expected, found)
    assert_close_weights(weights_of(one), four[0][name]["weights"])
    for other in four[1:]:
        assert other[name]["steps"] == four[0][name]["steps"]
        assert all((other[name]["weights"][key] == w).all() for key, w in four[0][name]["weights"].items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_is_split_over_its_ranks_alone(four, name):
    whole = sum(weight.size for weight in four[0][name]["weights"].values())
    held = [found[name]["held"] for found in four]
    ranks = SHARDS[name]
    assert [sum(held[first : first + ranks]) for first in range(0, RANKS, ranks)] == [whole] * (RANKS // ranks)


def test_a_checkpoint_of_copies_goes_on_in_another_layout(model, four):
    written = sorted(path.name for path in (model.parent / "saved").iterdir())
    assert sorted(name for found in four for name in found["files"]) == written
    assert_close_metrics(four[0]["last"][0], four[0]["resumed"][0])
    assert_close_weights(four[0]["last_weights"], four[0]["resumed_weights"])
    one = build(model, 0, 1)
    one.load(model.parent / "saved")
    (found,) = train(one, LEASES[2:], 0, 1)
    assert_close_metrics(four[0]["last"][0], found)


def test_adapters_are_trained_over_weights_in_the_dtype_of_the_passes(model):
    lora = LoraConfig(rank=4)
    backend = build(model, 0, 1, FsdpConfig(param_dtype="bfloat16"), lora=lora)
    kept = {".lora_" in name: p.dtype for name, p in backend._policy.causal_lm.named_parameters()}
    assert kept == {True: torch.float32, False: torch.bfloat16}
    (bfloat16,) = train(backend, LEASES[:1], 0, 1)
    (float32,) = train(build(model, 0, 1, lora=lora), LEASES[:1], 0, 1)
    assert bfloat16["grad_norm"] == pytest.approx(float32["grad_norm"], rel=0.1)


def test_what_a_rank_alone_holds_is_neither_gathered_nor_copied(model, monkeypatch):
    """DTensor takes 0.3 ms for each tensor to find out that there is nothing to gather."""
    from torch.distributed.tensor import DTensor

    one = build(model, 0, 1)
    expected = weights_of(one)
    monkeypatch.setattr(DTensor, "full_tensor", None)
    held = {p.to_local().data_ptr() for p in one._policy.causal_lm.parameters()}
    found = dict(one.named_weights())
    assert {tensor.data_ptr() for tensor in found.values()} <= held
    assert_close_weights(expected, {name: tensor.numpy() for name, tensor in found.items()})
