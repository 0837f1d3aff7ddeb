"""What a trainer refuses or leaves alone: states of another run, models of another vocabulary, updates of nothing."""

import logging
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig, KlConfig
from asyncrl.config.trainer import FsdpConfig, LoraConfig, TrainerConfig
from asyncrl.errors import ConfigError, RunFailed
from asyncrl.trainer.fsdp import lora
from asyncrl.trainer.fsdp.optimizer import Update
from asyncrl.trainer.host_copies import HostState
from asyncrl.trainer.token_logprobs import LogitRules, token_logprobs
from asyncrl.types import LeaseManifest
from asyncrl_testing.backend_suite import VOCAB_SIZE, assert_same_weights, random_lease, weights_of
from asyncrl_testing.random_model import random_qwen3
from tests.backends import save
from tests.numerics.one_rank import SIZES, build, plan_of

pytestmark = pytest.mark.usefixtures("process_group")

LORA = LoraConfig(rank=4, alpha=6.0)
GAE = AlgorithmConfig(advantage="gae")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """plain, small (half of its vocabulary), unpadded (without the rows that no token uses) and moe (of experts)."""
    root = tmp_path_factory.mktemp("models")
    random_qwen3(**SIZES).save_pretrained(root / "plain")
    words = WordLevel({f"w{i}": i for i in range(VOCAB_SIZE - 8)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(root / "plain")
    for name, rows in (("small", VOCAB_SIZE // 2), ("unpadded", VOCAB_SIZE - 8)):
        random_qwen3(**{**SIZES, "vocab_size": rows}).save_pretrained(root / name)
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)).save_pretrained(root / "moe")
    return root


def train(backend, seed=1, **rules):
    lease = random_lease(seed)
    return backend.train_step(plan_of(lease, **rules), lease.trajectories)


def untrained(lease, ordinals):
    """The same lease without a trained token in the groups of `ordinals`."""
    groups = tuple(
        replace(g, lengths=tuple(n._replace(trained=0) for n in g.lengths)) if g.ordinal in ordinals else g
        for g in lease.manifest.groups
    )
    trajectories = {key: t.untrained() if key[0] in ordinals else t for key, t in lease.trajectories.items()}
    return replace(lease, manifest=LeaseManifest(0, groups)), trajectories


# -- what a checkpoint goes on with ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"algorithm": GAE}, "it has no critic"),
        ({}, {"lora": LORA}, "holds all weights, and this run trains adapters alone"),
        ({"lora": LORA}, {}, "holds adapters alone .* trains all weights"),
        ({"lora": LORA}, {"lora": LoraConfig(rank=8, alpha=12.0)}, r"shape \[4, 32\] in it, \[8, 32\] in this run"),
        ({"lora": LORA}, {"lora": LoraConfig(rank=4, alpha=60.0)}, "trained at 1.5"),
        ({"lora": LORA}, {"lora": replace(LORA, target_modules=["q_proj"])}, "24 too many"),
        ({"lora": replace(LORA, target_modules=["q_proj"])}, {"lora": LORA}, "96 tensors missing"),
        ({"model": "small"}, {}, r"embed_tokens.weight has the shape \[\d+, 32\] in it"),
    ],
)
def test_a_checkpoint_of_another_kind_of_run_is_named_and_loads_nothing(models, tmp_path, before, after, message):
    first, second = ({"model": "plain", **keys} for keys in (before, after))
    directory = save(build(models / first.pop("model"), **first), tmp_path / "trainer")
    backend = build(models / second.pop("model"), **second)
    start = weights_of(backend)
    with pytest.raises(ConfigError, match=message) as caught:
        backend.load(directory)
    assert "keep " in str(caught.value)
    assert_same_weights(start, weights_of(backend))


def test_a_base_that_moved_is_logged_and_another_one_of_the_hub_refused(models, tmp_path, caplog):
    directory = save(build(models / "plain", lora=LORA), tmp_path / "trainer")
    (tmp_path / "moved").mkdir()
    for file in (models / "plain").iterdir():
        os.link(file, tmp_path / "moved" / file.name)
    with caplog.at_level(logging.WARNING):
        build(models / "plain", lora=LORA).load(directory)
        assert not [r for r in caplog.records if r.name.startswith("asyncrl")]
        build(tmp_path / "moved", lora=LORA).load(directory)
    assert "trained on the weights of" in caplog.text

    def facts(name):
        return {lora.BASE: torch.tensor(list(name.encode()), dtype=torch.uint8)}

    lora.check_same(facts("org/a"), facts("org/a"))
    lora.check_same(facts("org/a"), {})
    with pytest.raises(ConfigError, match=r"set model\.path=org/b"):
        lora.check_same(facts("org/a"), facts("org/b"))


def test_a_random_state_of_another_kind_of_device_is_left_out(models, tmp_path, caplog):
    """A CUDA rank's has 16 bytes more."""
    backend = build(models / "plain")
    train(backend)
    backend.capture()
    _, captured = backend._captures._captured
    captured["rng.0"] = torch.cat([captured["rng.0"], torch.zeros(16, dtype=torch.uint8)])
    backend.save(tmp_path / "trainer")
    other = build(models / "plain")
    before = torch.get_rng_state()
    other.load(tmp_path / "trainer")
    assert_same_weights(weights_of(backend), weights_of(other))
    assert torch.equal(torch.get_rng_state(), before)
    assert "random state" in caplog.text


@pytest.mark.parametrize(
    ("trainer", "total_steps", "jumps"),
    [
        ({"schedule": "linear"}, 20, True),
        ({"schedule": "linear"}, 10, False),
        ({"schedule": "linear", "decay_steps": 10}, 20, False),
        ({}, 20, False),
    ],
)
def test_a_run_that_is_extended_says_that_its_rate_jumps(models, tmp_path, caplog, trainer, total_steps, jumps):
    directory = save(build(models / "plain", total_steps=10, **trainer), tmp_path / "trainer")
    build(models / "plain", total_steps=total_steps, **trainer).load(directory)
    assert ("trainer.decay_steps=10 keeps its curve" in caplog.text) == jumps


# -- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        ("algorithm.kl.path", lambda path: AlgorithmConfig(kl=KlConfig(coefficient=0.1, path=path))),
        ("algorithm.critic.path", lambda path: replace(GAE, critic=CriticConfig(path=path))),
    ],
)
def test_another_vocabulary_is_refused(models, key, algorithm):
    found = rf"{key}=.*small[\s\S]*its embedding has {VOCAB_SIZE // 2} rows, and .* has {VOCAB_SIZE - 8} tok"
    with pytest.raises(ConfigError, match=found):
        build(models / "plain", algorithm(str(models / "small")))
    for name in ("plain", "unpadded"):
        build(models / "plain", algorithm(str(models / name)))


def test_the_models_own_path_keeps_its_revision(models):
    backend = build(models / "plain", revision="pinned")
    path = str(models / "plain")
    assert [backend._models._named(p).revision for p in (None, path, "org/other")] == ["pinned", "pinned", None]


@pytest.mark.parametrize("reshard", [True, False])
def test_adapters_train_after_the_reference_was_asked(models, reshard):
    """In every micro-batch, also where gathered parameters are kept between passes."""
    fsdp = FsdpConfig(reshard_after_forward=reshard)
    backend = build(models / "plain", AlgorithmConfig(kl=KlConfig(coefficient=0.3)), lora=LORA, fsdp=fsdp, lr=1e-2)
    assert len(plan_of(random_lease(1)).microbatches) > 1
    found = [train(backend) for _ in range(2)]
    assert found[0].mean("train/kl_reference") == pytest.approx(0, abs=1e-6)
    assert found[1].mean("train/kl_reference") > 1e-5
    assert found[1].grad_norm > 0


def test_all_linear_on_a_mixture_leaves_experts_and_routers_out(models):
    backend = build(models / "moe", lora=LORA)
    adapted = {spec.name.split(".lora_")[0].rpartition(".")[2] for spec in backend.weight_specs()}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert train(backend).grad_norm > 0


@pytest.mark.parametrize("names", [["gate_proj", "up_proj", "down_proj"], ["q_proj", "gate_up_proj"], ["experts"]])
def test_adapters_on_experts_are_refused_by_name(models, names):
    with pytest.raises(ConfigError, match="the experts of a layer are one tensor"):
        build(models / "moe", lora=LoraConfig(rank=2, target_modules=names))


def test_adapters_begin_the_same_in_every_run_of_a_seed(models):
    a, b = (build(models / "plain", lora=LORA) for _ in range(2))
    assert_same_weights(weights_of(a), weights_of(b))


# -- updates -----------------------------------------------------------------------------------------------------


def trained_by(update):
    """The ordinals of an update's groups, which are drawn."""
    return {s.ordinal for microbatch in update for s in microbatch}


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), GAE], ids=["policy", "critic"])
def test_an_update_without_a_trained_token_moves_nothing(models, algorithm):
    """Momentum and weight decay would."""
    backend, lease = build(models / "plain", algorithm, weight_decay=0.1, lr=1e-2), random_lease(1)
    train(backend)
    before = {name: tensor.clone() for name, tensor in backend._live_state().items()}
    nothing, trajectories = untrained(lease, {g.ordinal for g in lease.manifest.groups})
    metrics = backend.train_step(plan_of(nothing), trajectories)
    assert (metrics.trained_tokens, metrics.skipped_updates, metrics.grad_norm) == (0, 1, 0)
    after = backend._live_state()
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    half, trajectories = untrained(lease, trained_by(plan_of(lease, num_minibatches=2).updates[0]))
    metrics = backend.train_step(plan_of(half, num_minibatches=2), trajectories)
    assert metrics.skipped_updates == 1
    assert metrics.trained_tokens > 0
    assert not torch.equal(before["model.model.norm.weight"], backend._live_state()["model.model.norm.weight"])


def test_an_update_that_is_not_finite_says_which_one_it_was(models):
    backend, lease = build(models / "plain"), random_lease(1)
    last = trained_by(plan_of(lease, num_minibatches=2).updates[1])
    spoilt = {
        key: replace(t, logprobs=np.full_like(t.logprobs, np.nan)) if key[0] in last else t
        for key, t in lease.trajectories.items()
    }
    with pytest.raises(RunFailed, match=r"update 2 of 2 in optimizer step 0[\s\S]*this update changed no weights"):
        backend.train_step(plan_of(lease, num_minibatches=2), spoilt)


def test_the_policys_warm_up_begins_when_it_is_trained(models):
    algorithm = replace(GAE, critic=CriticConfig(warmup_steps=2, lr=1e-2))
    backend, lease = build(models / "plain", algorithm, warmup_steps=2, total_steps=6), random_lease(1)
    rates = [backend.train_step(replace(plan_of(lease), step=s), lease.trajectories).lr for s in range(5)]
    assert rates == pytest.approx([0, 0, 0.5e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_output_layer_costs_no_gradient(frozen):
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=g) for s in ((11, 8), (17, 8), (17,)))
    targets = torch.randint(0, 17, (11,), generator=g)

    def gradients(*trained):
        leaves = {"hidden": hidden, "weight": weight, "bias": bias}
        leaves = {name: x.clone().requires_grad_(name in trained) for name, x in leaves.items()}
        logprobs, entropy = token_logprobs(*leaves.values(), targets, temperature=0.7, rules=LogitRules(3 * 17))
        found = logprobs.grad_fn.apply(torch.ones(11), None, None)
        (logprobs.sum() + entropy.sum()).backward()
        return [x.grad for x in leaves.values()], found[:3]

    rest = [name for name in ("hidden", "weight", "bias") if name != frozen]
    expected, _ = gradients("hidden", "weight", "bias")
    found, computed = gradients(*rest)
    at = ("hidden", "weight", "bias").index(frozen)
    assert computed[at] is None
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert (b is None) if number == at else torch.equal(a, b)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "a shard"])
def test_moments_that_move_between_steps_change_nothing(sharded):
    """Between two places of host memory, as beside a GPU between the host and the GPU."""

    def trained(*, moves):
        torch.manual_seed(0)
        module = torch.nn.Linear(8, 5)
        if sharded:
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        update = Update(module, TrainerConfig(lr=0.1), max_grad_norm=1.0, host_state=False)
        if moves:
            update._host_state = HostState(list(update._slots()))
        kept = [slot.read().data_ptr() for slot in update._slots()]
        for seed in range(3):
            module(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
            update.clip()
            update.step(0.1)
            assert [slot.read().data_ptr() for slot in update._slots()] == kept, "each in a buffer of its own"
        moments = [slot.read() for slot in update._slots()]
        return [p.full_tensor() if sharded else p for p in module.parameters()], moments

    for found, expected in zip(trained(moves=True), trained(moves=False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_moments_in_host_memory_change_nothing():
    def trained(*, host_state):
        torch.manual_seed(0)
        module = torch.nn.Linear(8, 5).cuda()
        update = Update(module, TrainerConfig(lr=0.1), max_grad_norm=1.0, host_state=host_state)
        for seed in range(3):
            g = torch.Generator(device="cuda").manual_seed(seed)
            module(torch.randn(4, 8, generator=g, device="cuda")).square().sum().backward()
            update.clip()
            update.step(0.1)
        places = {value.device.type for kept in update.optimizer.state.values() for value in kept.values()}
        moments = {kept[name].device.type for kept in update.optimizer.state.values() for name in ("exp_avg",)}
        return module, places, moments

    (plain, _, on_device), (offloaded, _, on_host) = trained(host_state=False), trained(host_state=True)
    assert (on_device, on_host) == ({"cuda"}, {"cpu"})
    for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(a, b)
