"""What the FSDP backend adds to a plain step, on one rank, against what it is to be equal to."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, GaeConfig, KlConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import FsdpConfig, LoraConfig, TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.backends import memory_of
from asyncrl.trainer.fsdp import sharded_state as state
from asyncrl.trainer.fsdp.backend import Publication
from asyncrl.trainer.fsdp.model import compile_layers
from asyncrl.trainer.fsdp.training_state import FsdpCheckpoint
from asyncrl.trainer.model_tensors import model_tensors
from asyncrl.trainer.step.batch import pack
from asyncrl.types import LeaseManifest, ModelFacts
from asyncrl.types.metrics import Metric
from asyncrl.weights.encodings.base import BaseWeights
from asyncrl_testing.backend_suite import assert_same_weights, random_lease, weights_of
from asyncrl_testing.random_model import random_qwen3
from tests.backends import save
from tests.numerics.one_rank import CPU, SIZES, build, plan_of, single_logprobs

pytestmark = pytest.mark.usefixtures("process_group")

KL = KlConfig(coefficient=0.3)
LORA = LoraConfig(rank=4, alpha=6.0)
PPO = AlgorithmConfig(advantage="gae", critic=CriticConfig(lr=1e-2), gae=GaeConfig(gamma=0.97, lam=0.9))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    random_qwen3(**SIZES).save_pretrained(root)
    return str(root)


# -- entropy, schedule, minibatches ------------------------------------------------------------------------------


def test_an_entropy_bonus_alone_raises_entropy(path):
    lease = random_lease(1)
    lease = replace(lease, advantages=tuple(np.zeros_like(a) for a in lease.advantages))
    backend = build(path, AlgorithmConfig(entropy_coefficient=0.1), lr=1e-2)
    seen = [backend.train_step(plan_of(lease), lease.trajectories).mean("train/entropy") for _ in range(4)]
    assert seen[-1] > seen[0] + 0.05


def test_the_rate_falls_over_the_run(path):
    backend = build(path, total_steps=4, schedule="cosine", min_lr_fraction=0.1)
    rates = [
        backend.train_step(plan_of(lease, num_minibatches=2), lease.trajectories).lr
        for lease in (random_lease(2, step=s) for s in (0, 2, 4))
    ]
    assert rates == pytest.approx([1e-3, 0.55e-3, 1e-4])


def test_two_minibatches_are_two_steps_of_half_the_groups(path):
    lease = random_lease(3)
    updates = plan_of(lease, num_minibatches=2).updates
    parts = [sorted({s.ordinal for microbatch in update for s in microbatch}) for update in updates]
    assert sorted(parts[0] + parts[1]) == [0, 1, 2, 3]
    halves = [
        replace(
            lease,
            manifest=LeaseManifest(0, tuple(lease.manifest.groups[i] for i in part)),
            groups=tuple(lease.groups[i] for i in part),
            advantages=tuple(lease.advantages[i] for i in part),
        )
        for part in parts
    ]
    whole, apart = build(path), build(path)
    metrics = whole.train_step(plan_of(lease, num_minibatches=2), lease.trajectories)
    single = [apart.train_step(plan_of(half), lease.trajectories) for half in halves]
    assert_same_weights(weights_of(whole), weights_of(apart))
    assert metrics.trained_tokens == sum(m.trained_tokens for m in single)
    assert metrics.packed_tokens == sum(m.packed_tokens for m in single)
    assert metrics.loss == pytest.approx(np.mean([m.loss for m in single]))
    assert metrics.grad_norm == pytest.approx(np.mean([m.grad_norm for m in single]))
    assert metrics.ratio_max == max(m.ratio_max for m in single)
    for name, value in metrics.means:
        if not name.startswith("lag/") and name != "train/effective_samples":  # no means over the tokens
            expected = sum(m.mean(name) * m.trained_tokens for m in single) / metrics.trained_tokens
            assert value == pytest.approx(expected), name


def test_a_plan_may_bring_the_bounds_of_corrections_closer(path):
    """As the off-policy guard does: the step is that of a recipe with these bounds, and the next one may go back."""
    corrections = [CorrectionConfig(name="masked_is", high=1.5), CorrectionConfig(name="m2po", high=0.2)]
    algorithm = AlgorithmConfig(corrections=corrections)
    lease = random_lease(7)
    plan = plan_of(lease)
    raised, recipe = build(path, algorithm), build(path, algorithm.closer(0.25))
    metrics = raised.train_step(replace(plan, correction_bounds=0.25), lease.trajectories)
    assert metrics == recipe.train_step(plan, lease.trajectories)
    assert_same_weights(weights_of(raised), weights_of(recipe))
    still = replace(lease, advantages=tuple(np.zeros_like(a) for a in lease.advantages))  # moves no weights
    backend, touched = build(path, algorithm), []
    for bounds in (1.0, 0.25, 1.0):
        seen = backend.train_step(replace(plan_of(still), correction_bounds=bounds), still.trajectories)
        touched.append([seen.mean(Metric.TOUCHED.of(c.name)) for c in corrections])
    assert touched[0] == touched[2]
    assert all(closer > usual for usual, closer in zip(touched[0], touched[1], strict=True))


# -- reference and proximal policy -------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reference_kl_is_the_estimate_summed_over_trained_tokens(path, estimator):
    algorithm = AlgorithmConfig(kl=KlConfig(coefficient=0.1, estimator=estimator, place="reward"))
    backend, lease = build(path, algorithm), random_lease(4)
    own = backend.logprobs(plan_of(lease), lease.trajectories)
    for _ in range(2):
        backend.train_step(plan_of(lease), lease.trajectories)  # the reference stays what the policy was
    found = backend.reference_kl(plan_of(lease, num_minibatches=2, num_epochs=2), lease.trajectories)
    assert set(found) == set(lease.trajectories)
    for key, t in lease.trajectories.items():
        d = (t.logprobs.astype(np.float64) - own[key].double().numpy())[t.loss_mask]
        tokens = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
        assert found[key] == pytest.approx(tokens.sum(), rel=1e-4, abs=1e-5)


def test_a_reference_keeps_nothing_gathered(path):
    """No backward pass would give its embedding and output layer back."""
    backend, lease = build(path, AlgorithmConfig(kl=KL)), random_lease(4)
    backend.reference_kl(plan_of(lease), lease.trajectories)
    assert all(isinstance(p, DTensor) for p in backend._models._reference.parameters())


def test_weights_are_gathered_where_they_are_trained_not_where_they_wait(path, monkeypatch):
    """Device meta stands for a GPU whose weights are in host memory between steps."""
    backend, devices = build(path), []
    full = state.full
    monkeypatch.setattr(state, "full", lambda tensor: devices.append(tensor.device.type) or full(tensor))
    publication = Publication(backend._policy.causal_lm, backend._models.layout, backend._spec, torch.device("meta"))
    next(publication.tensors())
    assert devices == ["meta"]


def test_a_step_after_reference_kl_is_the_same_without_asking_again(path):
    algorithm, lease = AlgorithmConfig(kl=KL), random_lease(5)
    fresh, told = build(path, algorithm), build(path, algorithm)
    passes = []
    told._models._reference.register_forward_pre_hook(lambda *_: passes.append(1))
    told.reference_kl(plan_of(lease), lease.trajectories)
    asked = len(passes)
    for number in range(2):
        assert fresh.train_step(plan_of(lease), lease.trajectories) == told.train_step(
            plan_of(lease), lease.trajectories
        )
        assert (len(passes) > asked) == (number > 0)
    assert_same_weights(weights_of(fresh), weights_of(told))


def test_kl_in_the_loss_pulls_the_policy_back(path):
    lease = random_lease(6)
    free, held = build(path, lr=1e-2), build(path, AlgorithmConfig(kl=KlConfig(coefficient=20.0)), lr=1e-2)
    first = held.train_step(plan_of(lease), lease.trajectories)
    assert first.mean("train/kl_reference") == pytest.approx(0, abs=1e-6)
    free.train_step(plan_of(lease), lease.trajectories)
    for _ in range(5):
        free.train_step(plan_of(lease), lease.trajectories)
        last = held.train_step(plan_of(lease), lease.trajectories)
    start = build(path).logprobs(plan_of(lease), lease.trajectories)

    def moved(backend):
        now = backend.logprobs(plan_of(lease), lease.trajectories)
        return np.mean([float((now[k] - start[k]).abs().mean()) for k in now if len(now[k])])

    assert moved(held) < 0.6 * moved(free)
    assert last.mean("train/kl_reference") > 0


def test_reference_kl_without_a_reference_is_refused(path):
    lease = random_lease(5)
    with pytest.raises(ValueError, match="coefficient"):
        build(path).reference_kl(plan_of(lease), lease.trajectories)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_proximal_policy_is_that_before_the_step(path, temperature):
    """Two updates on the ratio to the proximal policy are two on the ratio to a behaviour policy that is the same."""
    lease = random_lease(7)
    proximal = build(path, AlgorithmConfig(ratio="proximal"), temperature=temperature)
    behavior = build(path, AlgorithmConfig(), temperature=temperature)
    plan = plan_of(lease, num_epochs=2, budget=1000)
    (microbatch,) = plan.updates[0]
    tokens = pack(microbatch, lease.trajectories, predict="trained", device=CPU).tokens
    with torch.no_grad():
        parts = proximal._policy(tokens, temperature)[0].split([s.lengths.trained for s in microbatch])
    replayed = dict(lease.trajectories)
    for s, part in zip(microbatch, parts, strict=True):
        t = replayed[s.ordinal, s.index]
        logprobs = t.logprobs.copy()
        logprobs[t.loss_mask] = part.numpy()
        replayed[s.ordinal, s.index] = replace(t, logprobs=logprobs)
    a, b = proximal.train_step(plan, lease.trajectories), behavior.train_step(plan, replayed)
    assert a.loss == pytest.approx(b.loss, abs=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    assert a.mean("train/clip_fraction") == b.mean("train/clip_fraction")
    assert_same_weights(weights_of(proximal), weights_of(behavior))


def test_one_update_needs_no_pass_for_the_proximal_policy(path):
    lease = random_lease(8)
    (plan,) = lease.plans(budget=64)
    backend = build(path, AlgorithmConfig(ratio="proximal"))
    passes = []
    backend._policy.register_forward_pre_hook(lambda *_: passes.append(1))
    metrics = backend.train_step(plan, lease.trajectories)
    assert len(passes) == len(plan.microbatches)
    assert metrics.mean("train/clip_fraction") == 0


def test_without_lag_the_log_linear_policy_is_the_one_that_sampled(path):
    """So that several updates of a step have a trust region."""
    lease, bounds = random_lease(8), {"clip_low": 0.02, "clip_high": 0.02}
    log_linear = build(path, AlgorithmConfig(ratio="proximal", proximal="log_linear", **bounds), lr=1e-2)
    behavior = build(path, AlgorithmConfig(**bounds), lr=1e-2)
    a, b = (x.train_step(plan_of(lease, num_epochs=3), lease.trajectories) for x in (log_linear, behavior))
    assert a == b
    assert a.mean("train/clip_fraction") > 0.3
    assert_same_weights(weights_of(log_linear), weights_of(behavior))


# -- token advantages and critic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_are_whitened_over_the_update(path, name):
    """Shifting and scaling every reward of the update changes nothing."""
    lease = random_lease(9)
    scaled = replace(lease, advantages=tuple(3 * a + 2 for a in lease.advantages))
    algorithm = AlgorithmConfig(advantage=name)
    a, b = build(path, algorithm), build(path, algorithm)
    first = a.train_step(plan_of(lease), lease.trajectories)
    second = b.train_step(plan_of(scaled), scaled.trajectories)
    assert first.loss == pytest.approx(second.loss, abs=1e-5)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)
    counts = [t.num_trained_tokens for t in lease.trajectories.values()]
    rewards = np.repeat(np.concatenate(lease.advantages), counts)
    if name == "reinforce_plus_plus":
        assert first.mean("train/advantage_mean") == pytest.approx(rewards.mean(), rel=1e-5)
    plain = build(path)  # the same advantages, whitened by hand
    white = [(a - rewards.mean()) / rewards.std() for a in lease.advantages]
    third = plain.train_step(plan_of(replace(lease, advantages=tuple(white))), lease.trajectories)
    assert third.loss == pytest.approx(first.loss, abs=1e-5)


def test_a_kl_penalty_lowers_the_returns_of_the_tokens_before_it(path):
    lease, coefficient = random_lease(10), 0.5
    kl = KlConfig(coefficient=coefficient, estimator="k1", place="reward")
    algorithm = AlgorithmConfig(advantage="reinforce_plus_plus", kl=kl, gae=GaeConfig(whiten=False))
    backend = build(path, algorithm)
    own = backend.logprobs(plan_of(lease), lease.trajectories)
    found = backend.train_step(plan_of(lease), lease.trajectories).mean("train/advantage_mean")
    returns = []
    for (ordinal, index), t in lease.trajectories.items():
        d = (t.logprobs - own[ordinal, index].numpy())[t.loss_mask].astype(np.float64)
        returns += list(lease.advantages[ordinal][index] - coefficient * np.cumsum(d[::-1])[::-1])
    assert found == pytest.approx(np.mean(returns), rel=1e-4)


def test_the_critic_learns_the_returns_and_the_policy_waits_for_it(path):
    lease = random_lease(11)
    backend = build(path, replace(PPO, critic=CriticConfig(lr=1e-2, warmup_steps=25, clip=0.0)))
    start, seen = weights_of(backend), []
    for step in range(26):
        plan = replace(plan_of(lease), step=step)
        if step == 25:
            assert_same_weights(start, weights_of(backend))
        seen.append(backend.train_step(plan, lease.trajectories))
    assert any(not np.array_equal(start[name], w) for name, w in weights_of(backend).items())
    assert seen[0].mean("critic/value_mean") == 0
    assert seen[0].mean("critic/explained_variance") == pytest.approx(0, abs=1e-6)
    assert seen[0].mean("critic/grad_norm") > 0
    assert seen[0].grad_norm == 0
    assert seen[25].grad_norm > 0
    assert seen[25].mean("critic/loss") < 0.3 * seen[0].mean("critic/loss")
    assert seen[25].mean("critic/explained_variance") > 0.5
    assert all(m.mean("train/clip_fraction") >= 0 for m in seen)


def test_the_critics_value_is_clipped_around_that_before_the_step(path):
    lease = random_lease(12)
    algorithm = replace(PPO, critic=CriticConfig(lr=1e-2, clip=1e-4))
    metrics = build(path, algorithm).train_step(plan_of(lease, num_epochs=3), lease.trajectories)
    assert 0.3 < metrics.mean("critic/clip_fraction") < 1
    once = build(path, algorithm).train_step(plan_of(lease), lease.trajectories)
    assert once.mean("critic/clip_fraction") == 0


def test_a_critic_is_no_part_of_a_publish_and_part_of_a_checkpoint(path, tmp_path):
    backend = build(path, PPO)
    assert {s.name for s in backend.weight_specs()} == {s.name for s in build(path).weight_specs()}
    save(backend, tmp_path / "trainer")
    without = build(path)
    save(without, tmp_path / "plain")
    with pytest.raises(ConfigError, match="critic"):
        backend.load(tmp_path / "plain")


# -- adapters ----------------------------------------------------------------------------------------------------


def trained_lora(path, algorithm=None, **trainer):
    backend, lease = build(path, algorithm, lora=LORA, lr=1e-2, **trainer), random_lease(13)
    for _ in range(3):
        metrics = backend.train_step(plan_of(lease), lease.trajectories)
    return backend, lease, metrics


def merged_by_peft(backend, path):
    """What merge_and_unload gives, from the adapters as they are in training."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear")
    wrapped = peft.get_peft_model(model, config)
    tensors = {f"base_model.model.{name}": t.detach() for name, t in state.published_tensors(backend._policy.causal_lm)}
    with torch.no_grad():
        own = dict(wrapped.named_parameters())
        for name, tensor in tensors.items():
            own[name.replace(".weight", ".default.weight")].copy_(state.full(tensor))
    return wrapped.merge_and_unload()


def test_a_replica_merges_what_peft_would(path):
    backend, lease, _ = trained_lora(path)
    published = {name: t.clone() for name, t in backend.named_weights()}
    whole = sum(s.nbytes for s in build(path).weight_specs())
    sent = sum(s.nbytes for s in backend.weight_specs())
    assert sent == sum(t.numel() * 4 for t in published.values()) < whole
    assert all(".lora_" in name for name in published)
    expected = merged_by_peft(backend, path)
    found = dict(BaseWeights(path).merged(published))
    wanted = {n: t for n, t in expected.state_dict().items() if n != "lm_head.weight"}
    assert set(found) == set(wanted)
    changed = 0
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)
        changed += not torch.equal(found[name], dict(BaseWeights(path).merged({}))[name])
    assert changed == 2 * 7
    logprobs = backend.logprobs(plan_of(lease), lease.trajectories)
    key, t = next((k, t) for k, t in lease.trajectories.items() if len(t.response_ids) > 5)
    torch.testing.assert_close(logprobs[key].double(), single_logprobs(expected, t), atol=1e-4, rtol=0)


def test_only_adapters_are_trained_and_the_reference_is_the_model_without_them(path):
    backend, lease, metrics = trained_lora(path, AlgorithmConfig(kl=KL))
    assert backend._models._reference is None
    assert metrics.mean("train/kl_reference") > 1e-4
    frozen = [n for n, p in backend._policy.named_parameters() if not p.requires_grad]
    assert frozen
    assert not any(".lora_" in name for name in frozen)
    plain = build(path, AlgorithmConfig(kl=KL))
    with_adapters = backend.reference_kl(plan_of(lease), lease.trajectories)
    assert with_adapters == pytest.approx(plain.reference_kl(plan_of(lease), lease.trajectories), abs=1e-4)
    backend.train_step(plan_of(lease), lease.trajectories)  # adapters are on again, and have gradients
    assert all(p.requires_grad for n, p in backend._policy.named_parameters() if ".lora_" in n)


def test_a_checkpoint_of_adapters_is_small_and_gives_whole_weights(path, tmp_path):
    backend, _, _ = trained_lora(path)
    save(backend, tmp_path / "lora")
    weights = dict(FsdpCheckpoint(tmp_path / "lora").weights(ModelConfig(path=str(path))))
    for name, tensor in merged_by_peft(backend, path).state_dict().items():
        if name != "lm_head.weight":
            torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=0)
    full = build(path)
    save(full, tmp_path / "full")
    size = [sum(f.stat().st_size for f in (tmp_path / kind).iterdir()) for kind in ("lora", "full")]
    assert size[0] < size[1]
    plain = dict(FsdpCheckpoint(tmp_path / "full").weights(ModelConfig(path=str(path))))
    for name, weight in weights_of(full).items():
        np.testing.assert_array_equal(plain[name].numpy(), weight, err_msg=name)
    with pytest.raises(ConfigError, match="no checkpoint"):
        FsdpCheckpoint(tmp_path / "absent")


@pytest.mark.parametrize("names", [["absent"], ["embed_tokens"], ["q_proj", "lm_head"]])
def test_modules_that_cannot_be_adapted_are_refused(path, names):
    with pytest.raises(ConfigError, match="target_modules"):
        build(path, lora=LoraConfig(rank=2, target_modules=names))


# -- memory and speed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "saves",
    [{"fsdp": FsdpConfig(offload_parameters=True)}, {"recompute": "selective"}, {"recompute": "full"}],
    ids=["parameters", "activations but attention", "activations"],
)
@pytest.mark.parametrize("lora", [LoraConfig(), LORA], ids=["full", "lora"])
def test_what_saves_memory_changes_nothing(path, saves, lora):
    lease = random_lease(14)
    a, b = build(path, PPO, lora=lora), build(path, PPO, lora=lora, **saves)
    for _ in range(2):
        torch.manual_seed(0)
        first = a.train_step(plan_of(lease), lease.trajectories)
        torch.manual_seed(0)
        second = b.train_step(plan_of(lease), lease.trajectories)
        assert first.loss == pytest.approx(second.loss, abs=1e-6)
    assert_same_weights(weights_of(a), weights_of(b))


def test_compiled_layers_compute_the_same_for_rows_of_any_length(path):
    """Captured and run as they are: generating code takes a minute, and is the compiler's business."""
    plain, compiled = build(path), build(path)
    compile_layers(compiled._policy.causal_lm, backend="eager")
    for seed, budget in ((15, 64), (16, 90)):
        lease = random_lease(seed)
        a = plain.train_step(plan_of(lease, budget=budget), lease.trajectories)
        b = compiled.train_step(plan_of(lease, budget=budget), lease.trajectories)
        assert a.loss == pytest.approx(b.loss, abs=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert [s.name for s in plain.weight_specs()] == [s.name for s in compiled.weight_specs()]


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "lora", "dtype"),
    [
        (AlgorithmConfig(), LoraConfig(), "bfloat16"),
        (AlgorithmConfig(advantage="gae", kl=KlConfig(coefficient=0.1)), LoraConfig(), "bfloat16"),
        (AlgorithmConfig(advantage="gae", kl=KlConfig(coefficient=0.1)), LoraConfig(), "float32"),
        (AlgorithmConfig(kl=KlConfig(coefficient=0.1)), LoraConfig(rank=4), "bfloat16"),
        (AlgorithmConfig(), LoraConfig(rank=2, target_modules=["q_proj", "down_proj"]), "float32"),
    ],
    ids=["plain", "critic and reference", "the same in float32", "adapters", "some adapters"],
)
def test_the_memory_that_a_plan_announces_is_what_a_rank_holds(path, algorithm, lora, dtype):
    fsdp = FsdpConfig(param_dtype=dtype)
    backend = build(path, algorithm, lora=lora, fsdp=fsdp)
    models = backend._models
    held = [m for m in (models.policy, models.critic, models._reference) if m is not None]
    modules = [getattr(m, "causal_lm", m) for m in held]
    weights = sum(p.numel() * p.element_size() for m in modules for p in m.parameters())
    trained = sum(p.numel() * 4 for m in modules for p in m.parameters() if p.requires_grad)
    updates = [u for u in (models.update, models.critic_update) if u is not None]
    moments = sum(t.numel() * 4 for u in updates for s in u.optimizer.state.values() for t in s.values() if t.ndim)
    config = json.loads((Path(path) / "config.json").read_text())
    tensors = model_tensors(ModelFacts.of_config(path, config))
    needs = {"critic": algorithm.needs_critic, "reference": algorithm.needs_reference}
    (announced,) = memory_of(TrainerConfig(lora=lora, fsdp=fsdp), tensors, **needs)
    assert (announced.weights, announced.gradients, announced.optimizer) == (weights, trained, moments)
