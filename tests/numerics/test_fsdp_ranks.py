"""FSDP2 on two ranks (gloo, two processes, started once) against one rank in this process."""

import time
from dataclasses import asdict, replace
from datetime import timedelta

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, GaeConfig, KlConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import FsdpConfig, LoraConfig
from asyncrl.trainer.fsdp import models
from asyncrl.trainer.fsdp.model import load_model, shard
from asyncrl.trainer.fsdp.models import Policy
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.types import RankPlan
from asyncrl_testing.backend_suite import VOCAB_SIZE, assert_same_weights, random_lease, weights_of
from asyncrl_testing.random_model import random_qwen3_moe
from asyncrl_testing.rank_processes import run_ranks
from tests.backends import fsdp_backend, save, trainer_spec
from tests.numerics.one_rank import SIZES

RANKS = 2
DEADLINE_S = 240
LEASES = [random_lease(20 + step, step=step) for step in range(3)]
NOT_RESHARDED = FsdpConfig(reshard_after_forward=False)


PPO = AlgorithmConfig(
    advantage="gae",
    ratio="proximal",
    critic=CriticConfig(lr=1e-2),
    gae=GaeConfig(gamma=0.98, lam=0.9),
    kl=KlConfig(coefficient=0.1, place="reward"),
    entropy_coefficient=0.01,
)
FITTED = AlgorithmConfig(
    ratio="proximal",
    corrections=[
        CorrectionConfig(name="truncated_is", high=1.1, normalize=True),
        CorrectionConfig(name="m2po", high=2.0),
    ],
    router_aux_coefficient=0.5,
)
LORA = LoraConfig(rank=4)
LARGE_VOCAB, LARGE_BYTES = 600_000, 4 * 36 * 600_000


def build(path, rank, world_size, fsdp=None, algorithm=None, lora=None, recompute="auto"):
    settings = {"num_ranks": world_size, "fsdp": fsdp or FsdpConfig(), "lora": lora or LoraConfig()}
    settings["recompute"] = recompute
    spec = trainer_spec(path, algorithm, lr=1e-3, weight_decay=0.1, warmup_steps=2, temperature=0.9, **settings)
    return fsdp_backend(spec, rank, world_size)


def step(backend, lease, rank, world_size):
    return asdict(backend.train_step(lease.plans(world_size, 48)[rank], lease.trajectories))


def saved_between(backend, plan_of, leases, directory):
    """What is found before, in and after two steps, and in one more after a checkpoint. `plan_of`: a lease's plan."""
    logprobs = backend.logprobs(plan_of(leases[0]), leases[0].trajectories)
    found = {"logprobs": {key: value.numpy() for key, value in logprobs.items()}}
    found["specs"] = [(s.name, s.shape) for s in backend.weight_specs()]
    found["steps"] = [asdict(backend.train_step(plan_of(lease), lease.trajectories)) for lease in leases[:2]]
    found["weights"] = weights_of(backend)
    save(backend, directory)
    found["last"] = asdict(backend.train_step(plan_of(leases[2]), leases[2].trajectories))
    found["last_weights"] = weights_of(backend)
    return found


def resumed_from(directory, path, rank, world_size):
    backend = build(path, rank, world_size)
    backend.load(directory)
    return {"resumed": step(backend, LEASES[2], rank, world_size), "resumed_weights": weights_of(backend)}


def features(path, rank, world_size, directory=None):
    """PPO with critic, reference and proximal policy over two minibatches and epochs; adapters; the divergence; a
    mixture with corrections and a router loss over whole updates."""
    rules = PackingRules(num_plans=world_size, max_tokens_per_microbatch=48, num_minibatches=2, num_epochs=2)
    plans = [plan_step(lease.manifest, lease.advantages, rules)[rank] for lease in LEASES]
    ppo = build(path, rank, world_size, algorithm=PPO)
    found = {"kl": ppo.reference_kl(plans[0], LEASES[0].trajectories)}
    lora = build(path, rank, world_size, algorithm=AlgorithmConfig(kl=KlConfig(coefficient=0.1)), lora=LORA)
    found["lora_start"] = weights_of(lora)
    lora.load(directory)
    mixture = build(path.parent / "mixture", rank, world_size, algorithm=FITTED)
    for name, backend in (("ppo", ppo), ("lora", lora), ("mixture", mixture)):
        found[name] = [asdict(backend.train_step(plans[i], LEASES[i].trajectories)) for i in range(2)]
        found[f"{name}_weights"] = weights_of(backend)
    return found


def memory_of_a_model(path) -> tuple[int, int]:
    """Bytes that this process grows by when it loads the model, and when that is sharded."""
    process, mesh = psutil.Process(), init_device_mesh("cpu", (RANKS,))
    before = process.memory_info().rss
    model, _ = load_model(ModelConfig(path=str(path)), FsdpConfig(), mesh)
    loaded = process.memory_info().rss
    shard(Policy(model), model, mesh, FsdpConfig())
    return loaded - before, process.memory_info().rss - before


def rank_main(_directory, rank, world_size, root):
    """What one of the two ranks does and finds; models and checkpoints are below `root`."""
    backend = build(root / "model", rank, RANKS)
    found = saved_between(backend, lambda lease: lease.plans(RANKS, 48)[rank], LEASES, root / "two")
    found |= resumed_from(root / "one", root / "model", rank, RANKS)

    # everything on rank 0, nothing but empty micro-batches on rank 1
    (plan,) = LEASES[0].plans(1, 48)
    idle = RankPlan(plan.step, tuple(((),) * len(update) for update in plan.updates))
    lopsided = build(root / "model", rank, RANKS, NOT_RESHARDED)
    found["lopsided"] = asdict(lopsided.train_step((plan, idle)[rank], LEASES[0].trajectories))
    found["lopsided_weights"] = weights_of(lopsided)

    found["features"] = features(root / "model", rank, RANKS, root / "lora")
    found["memory"] = memory_of_a_model(root / "large")

    # a NaN on one rank must stop both
    spoilt = LEASES[0].trajectories
    if rank == 1:
        spoilt = {k: replace(t, logprobs=np.full_like(t.logprobs, np.nan)) for k, t in spoilt.items()}
    try:
        backend.train_step(LEASES[0].plans(RANKS, 48)[rank], spoilt)
    except Exception as error:  # noqa: BLE001 the class is what is tested
        found["refused"] = type(error).__name__
    return found


def uneven(**changes):
    """A model whose shards are of unequal size."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 36, "intermediate_size": 49, "initializer_range": 0.2}
    return Qwen3Config(**sizes, **changes)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, process_group):
    """One rank's reference, and what the two ranks found."""
    root = tmp_path_factory.mktemp("ranks")
    config = uneven(tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(root / "model")
    random_qwen3_moe(vocab_size=VOCAB_SIZE).save_pretrained(root / "mixture")
    config.vocab_size = LARGE_VOCAB
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "large")
    one = build(root / "model", 0, 1)
    reference = saved_between(one, lambda lease: lease.plans(1, 48)[0], LEASES, root / "one")
    first = build(root / "model", 0, 1)
    reference["first"] = step(first, LEASES[0], 0, 1)
    reference["first_weights"] = weights_of(first)
    start = build(root / "model", 0, 1, lora=LORA)
    save(start, root / "lora")
    reference["features"] = features(root / "model", 0, 1, root / "lora")
    found = run_ranks(rank_main, root / "found", RANKS, root, preload=[__name__], deadline_s=DEADLINE_S)
    return reference | resumed_from(root / "two", root / "model", 0, 1), found


def assert_close_metrics(a, b, rel=1e-5, floor=1e-6):
    a, b = (metrics | dict(metrics["means"]) for metrics in (a, b))
    assert a.keys() == b.keys()
    for key in a.keys() - {"means"}:
        assert a[key] == pytest.approx(b[key], rel=rel, abs=floor + rel / 10), key


def assert_close_weights(a, b, tolerance=1e-5):
    """Adam turns a gradient of rounding size into a step of lr, so single elements may differ by that."""
    assert list(a) == list(b)
    for name, weight in a.items():
        difference = np.abs(weight - b[name])
        assert np.mean(difference > tolerance) < 0.01, name
        assert difference.max() < 3e-3, name


def test_metrics_are_those_of_one_rank_and_the_same_on_both(outcome):
    one, two = outcome
    assert two[0]["steps"] == two[1]["steps"]
    for a, b in zip(one["steps"], two[0]["steps"], strict=True):
        assert a["grad_norm"] > 0.1
        assert_close_metrics(a, b)


def test_weights_are_those_of_one_rank(outcome):
    one, two = outcome
    assert_close_weights(one["weights"], two[0]["weights"])
    assert_same_weights(two[0]["weights"], two[1]["weights"])
    assert two[0]["specs"] == [(name, w.shape) for name, w in two[0]["weights"].items()]
    assert two[0]["specs"] == two[1]["specs"]


def test_every_rank_has_the_logprobs_of_its_sequences(outcome):
    one, two = outcome
    assert not set(two[0]["logprobs"]) & set(two[1]["logprobs"])
    both = two[0]["logprobs"] | two[1]["logprobs"]
    assert set(both) == set(one["logprobs"])
    for key, value in both.items():
        np.testing.assert_allclose(value, one["logprobs"][key], atol=1e-5)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)], ids=["one, then two", "two, then one"])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(outcome, before, after):
    found = outcome[0], outcome[1][0]
    assert_close_metrics(found[before]["last"], found[after]["resumed"])
    assert_close_weights(found[before]["last_weights"], found[after]["resumed_weights"])


def test_adapters_begin_the_same_on_any_number_of_ranks(outcome):
    one, two = outcome
    start, *others = (found["features"]["lora_start"] for found in (one, *two))
    assert any(".lora_A." in name for name in start)
    assert all(np.array_equal(start[name], other[name]) for other in others for name in start)


def test_moments_are_restored_too(outcome):
    """Without them the update of the resumed step would differ by far more than rounding."""
    one, two = outcome
    name = "model.layers.0.mlp.up_proj.weight"
    update = one["last_weights"][name] - one["weights"][name]
    resumed = two[0]["resumed_weights"][name] - one["weights"][name]
    assert np.abs(update).max() > 1e-4
    np.testing.assert_allclose(resumed, update, atol=2e-6)


def test_a_rank_with_empty_microbatches_takes_part(outcome):
    one, two = outcome
    assert_close_metrics(one["first"], two[0]["lopsided"])
    assert two[0]["lopsided"] == two[1]["lopsided"]
    assert_close_weights(one["first_weights"], two[0]["lopsided_weights"])


@pytest.mark.parametrize("feature", ["ppo", "lora", "mixture"])
def test_every_feature_is_that_of_one_rank(outcome, feature):
    one, *two = (found["features"] for found in (outcome[0], *outcome[1]))
    assert two[0][feature] == two[1][feature]
    for a, b in zip(one[feature], two[0][feature], strict=True):
        assert a["grad_norm"] > 0
        assert_close_metrics(a, b, rel=1e-3)
    assert_close_weights(one[f"{feature}_weights"], two[0][f"{feature}_weights"], tolerance=1e-4)


def test_ppo_has_a_critic_and_the_divergence_from_the_reference_of_one_rank(outcome):
    one, *two = (found["features"] for found in (outcome[0], *outcome[1]))
    for metrics in one["ppo"]:
        assert dict(metrics["means"]).keys() >= {"critic/loss", "critic/explained_variance", "train/kl_reference"}
    assert two[0]["kl"] | two[1]["kl"] == pytest.approx(one["kl"], abs=1e-4)


def test_what_is_found_over_a_whole_update_is_measured(outcome):
    """M2PO's cut, the mean of importance weights, the load of a mixture's experts."""
    for metrics in outcome[0]["features"]["mixture"]:
        means = dict(metrics["means"])
        assert 0.1 < means["train/touched_fraction/m2po"] < 0.9
        assert means["train/router_balance"] > 2.01


def test_a_nan_on_one_rank_stops_both(outcome):
    assert [found["refused"] for found in outcome[1]] == ["RunFailed", "RunFailed"]


def test_only_the_first_rank_has_a_whole_model_in_memory(outcome):
    (first, _), (second, sharded) = (found["memory"] for found in outcome[1])
    assert first > 0.9 * LARGE_BYTES
    assert second < 0.2 * LARGE_BYTES
    assert sharded < 0.7 * LARGE_BYTES


def read_late(root, rank, world_size, path):
    """Builds a backend whose first rank reads for longer than a collective may take; and a step."""
    dist.barrier()  # a rank that is still connecting fails when another one leaves
    dist.destroy_process_group()
    store = dist.FileStore(str(root / "again"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=8))
    read = models.load_model

    def slowly(*args, **kwargs):
        found = read(*args, **kwargs)
        time.sleep(12 * (rank == 0))
        return found

    models.load_model = slowly
    return step(build(path, rank, world_size), LEASES[0], rank, world_size)["grad_norm"]


@pytest.mark.slow
def test_ranks_wait_for_the_one_that_reads_a_model_longer_than_for_a_collective(tmp_path):
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(tmp_path / "model")
    ranks = run_ranks(
        read_late,
        tmp_path / "ranks",
        RANKS,
        tmp_path / "model",
        preload=["asyncrl.trainer.fsdp.backend"],
        deadline_s=200,
    )
    assert len({float(norm) for norm in ranks}) == 1
