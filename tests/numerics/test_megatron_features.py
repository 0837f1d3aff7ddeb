"""Megatron-core on CPU ranks: PPO with critic, reference and proximal policy, resuming at another layout, and what must
stop all ranks, against FSDP2 on one rank in this process; and the vocabulary-parallel softmax against float64."""

from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.trainer import MegatronConfig
from asyncrl.errors import AsyncRLError
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.types import RankPlan
from asyncrl_testing.backend_suite import VOCAB_SIZE, random_lease, weights_of, with_experts, write_model
from asyncrl_testing.random_model import random_qwen3_moe
from asyncrl_testing.rank_processes import run_ranks
from tests.backends import fsdp_backend, megatron_backend, rank_spec, save
from tests.make import needs_megatron
from tests.numerics import test_fsdp_ranks
from tests.numerics.test_fsdp_ranks import PPO

pytestmark = [pytest.mark.slow, needs_megatron]

DEADLINE_S = 280
LEASES = [random_lease(60 + step, step=step) for step in range(3)]
RECORDED = [with_experts(lease) for lease in LEASES]
FITTED = replace(test_fsdp_ranks.FITTED, router_aux_coefficient=0.0)
BALANCED = AlgorithmConfig(router_aux_coefficient=0.5, entropy_coefficient=0.01)
DENSE = {
    "tp2": MegatronConfig(tensor_parallel=2),
    "pp2": MegatronConfig(pipeline_parallel=2),
    "cp2": MegatronConfig(context_parallel=2),
    "dp2": MegatronConfig(),
}
RECOMPUTE = {"pp2": "selective", "pp2-experts": "full"}
MIXTURE = {"tp2-ep2": MegatronConfig(tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=1)}
MIXTURE |= {
    "ep2": MegatronConfig(expert_parallel=2),
    "cp2-ep2": MegatronConfig(context_parallel=2, expert_parallel=2),
    "pp2-experts": MegatronConfig(pipeline_parallel=2),
}


def plans_of(lease, ranks, rank, num_epochs=1):
    rules = PackingRules(
        num_plans=ranks.num_plans, max_tokens_per_microbatch=48, num_minibatches=2, num_epochs=num_epochs
    )
    return plan_step(lease.manifest, lease.advantages, rules)[ranks.plan_of(rank)]


def train(backend, plans, number, leases=LEASES):
    return asdict(backend.train_step(plans[number], leases[number].trajectories))


def features(make, ranks, rank, models):
    """`make(path, algorithm)`: a backend. The first step has two epochs."""
    plans = [plans_of(lease, ranks, rank, num_epochs) for lease, num_epochs in zip(LEASES, (2, 1, 1), strict=True)]
    ppo = make(models["dense"], PPO)
    found = {"kl": ppo.reference_kl(plans[0], LEASES[0].trajectories)}
    found["ppo"] = [train(ppo, plans, number) for number in range(2)]
    found["ppo_weights"] = weights_of(ppo)
    return found, ppo, plans


def mixture(make, ranks, rank, models):
    plans = [plans_of(lease, ranks, rank) for lease in LEASES]
    trained, balanced = make(models["mixture"], FITTED), make(models["mixture"], BALANCED)
    replayed = make(models["mixture"], BALANCED, router_replay="rollout")
    replayed_logprobs = replayed.logprobs(plans[0], RECORDED[0].trajectories)
    free_logprobs = trained.logprobs(plans[0], LEASES[0].trajectories)
    return {
        "free_logprobs": {key: value.numpy() for key, value in free_logprobs.items()},
        "replayed_logprobs": {key: value.numpy() for key, value in replayed_logprobs.items()},
        "replayed": [train(replayed, plans, number, RECORDED) for number in range(2)],
        "replayed_weights": weights_of(replayed),
        "mixture": [train(trained, plans, number) for number in range(2)],
        "balanced": [train(balanced, plans, number) for number in range(2)],
        "balanced_weights": weights_of(balanced),
    }


def offloaded(make, plans, root):
    """Two steps, a checkpoint, and a step after it, with the optimizer's state on the device and on the host; the
    places where steps find the state on the host differ from those where it rests."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        for offload in (False, True):
            key = f"{dtype}-{offload}"
            backend = make(MegatronConfig(param_dtype=dtype, offload_optimizer=offload))
            update = backend._models.policy.optimizer
            rests, seen = places(update), []
            for part in update._parts():
                part.optimizer.register_step_pre_hook(lambda *_, u=update, seen=seen: seen.append(places(u)))
            found[key] = {"steps": [train(backend, plans, number) for number in range(2)]}
            save(backend, root / key)
            found[key]["moved"] = [[a != b for a, b in zip(rests, there, strict=True)] for there in seen]
            found[key]["returned"] = places(update) == rests
            train(backend, plans, 2)
            found[key]["weights"] = weights_of(backend)
            resumed = make(MegatronConfig(param_dtype=dtype, offload_optimizer=offload))
            resumed.load(root / key)
            train(resumed, plans, 2)
            found[key]["resumed_weights"] = weights_of(resumed)
    return found


def places(update):
    """Addresses of the tensors that offloading moves."""
    owned = {id(m) for part in update._parts() for group in part.shard_fp32_from_float16_groups for m in group}
    tensors = []
    for _, share in update.shares():
        tensors += [share.moments["exp_avg"], share.moments["exp_avg_sq"]]
        tensors += [share.master] if id(share.master) in owned else []
    return [t.data_ptr() for t in tensors]


def lengths_read_back(*args, **kwargs):
    raise AssertionError("the angles of a row are applied at once: this way reads its lengths from the device")


def rank_main(root, rank, world_size, models):
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils._apply_rotary_pos_emb_thd = lengths_read_back
    found, former = {"softmax": softmax_error(dist.group.WORLD)}, None
    for name, layout in (DENSE | MIXTURE).items():
        ranks = rank_spec("none", world_size, "megatron", layout).trainer.layout

        again = RECOMPUTE.get(name, "auto")

        def make(path, algorithm, layout=layout, router_replay="off", recompute=again):
            trainer = {"router_replay": router_replay, "recompute": recompute}
            spec = rank_spec(path, world_size, "megatron", layout, algorithm, **trainer)
            return megatron_backend(spec, rank, world_size)

        if name in MIXTURE:
            found[name] = mixture(make, ranks, rank, models)
            parallel_state.destroy_model_parallel()
            continue
        found[name], ppo, plans = features(make, ranks, rank, models)
        if former is not None:
            resumed = make(models["dense"], PPO)
            resumed.load(former)
            found[name]["resumed"] = train(resumed, plans, 2)
        former = root / f"{name}-trainer"
        save(ppo, former)
        found[name]["last"] = train(ppo, plans, 2)
        # a NaN in one plan must stop all ranks; an idle plan must not
        spoilt = {k: replace(t, logprobs=np.full_like(t.logprobs, np.nan)) for k, t in LEASES[0].trajectories.items()}
        try:
            ppo.train_step(plans[0], spoilt if ranks.plan_of(rank) == 0 else LEASES[0].trajectories)
        except AsyncRLError as error:
            found[name]["refused"] = type(error).__name__
        (whole,) = LEASES[0].plans(1, 48)
        if name == "dp2":
            build = lambda layout: make(models["dense"], AlgorithmConfig(), layout)  # noqa: E731
            found[name]["offload"] = offloaded(build, plans, root)
        idle = RankPlan(whole.step, tuple(((),) * len(update) for update in whole.updates))
        plain = make(models["dense"], AlgorithmConfig())
        plan = whole if ranks.plan_of(rank) == 0 else idle
        found[name]["lopsided"] = asdict(plain.train_step(plan, LEASES[0].trajectories))
        parallel_state.destroy_model_parallel()
    return found


def softmax_error(group):
    """Largest error of log-probabilities, entropies and gradients against float64, and of chunks against one chunk."""
    from asyncrl.trainer.token_logprobs import LogitRules, SplitVocabulary, token_logprobs

    draw = torch.Generator().manual_seed(0)
    vocab_size, rows, rank = 41, 24, group.rank()
    hidden = torch.randn(30, 16, generator=draw)
    weight = torch.randn(48, 16, generator=draw) * 0.5
    targets = torch.randint(0, vocab_size, (30,), generator=draw)
    mix = torch.randn(2, 30, generator=draw)
    exact_hidden, exact_weight = (t.double().requires_grad_() for t in (hidden, weight[:vocab_size]))
    logp = (exact_hidden @ exact_weight.T / 0.7).log_softmax(-1)
    exact = torch.stack([logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])
    (exact * mix).sum().backward()
    errors = []
    for chunk in (1 << 20, 100):
        own_hidden, own_weight = hidden.clone().requires_grad_(), weight[rank * rows :][:rows].clone().requires_grad_()
        found = torch.stack(
            token_logprobs(
                own_hidden, own_weight, None, targets, temperature=0.7, rules=LogitRules(chunk),
                split=SplitVocabulary(group, vocab_size),
            )
        )  # fmt: skip
        (found * mix).sum().backward()
        dist.all_reduce(own_hidden.grad, group=group)
        padded = torch.zeros(48, 16, dtype=torch.float64)
        padded[:vocab_size] = exact_weight.grad
        errors.append(float((found - exact).abs().max()))
        errors.append(float((own_hidden.grad - exact_hidden.grad).abs().max()))
        errors.append(float((own_weight.grad - padded[rank * rows :][:rows]).abs().max()))
    return max(errors)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, process_group):
    """FSDP2's findings, and those of two ranks."""
    root = tmp_path_factory.mktemp("features")
    models = {"dense": write_model(root / "dense"), "mixture": str(root / "mixture")}
    random_qwen3_moe(vocab_size=VOCAB_SIZE).save_pretrained(root / "mixture")
    ranks = run_ranks(
        rank_main, root / "ranks", 2, models, preload=["tests.numerics.megatron_ranks"], deadline_s=DEADLINE_S
    )

    def make(path, algorithm, router_replay="off"):
        return fsdp_backend(rank_spec(path, 1, "fsdp", algorithm=algorithm, router_replay=router_replay))

    single = rank_spec("none", 1, "fsdp").trainer.layout
    found, ppo, plans = features(make, single, 0, models)
    found["last"] = train(ppo, plans, 2)
    plain = make(models["dense"], AlgorithmConfig())
    (whole,) = LEASES[0].plans(1, 48)
    found["lopsided"] = asdict(plain.train_step(whole, LEASES[0].trajectories))
    return found | mixture(make, single, 0, models), ranks


def assert_close_weights(outcome, layout, key):
    """The tensors that all ranks send are FSDP2's."""
    expected, ranks = outcome
    weights = {name: weight for rank in ranks for name, weight in rank[layout][key].items()}
    for name, weight in expected[key].items():
        assert np.mean(np.abs(weights[name] - weight) > 1e-4) < 0.01, name


assert_close_metrics = partial(test_fsdp_ranks.assert_close_metrics, floor=1e-5)


def assert_close_steps(outcome, layout, key, rel=1e-4):
    """What the first rank measured in each step of `key` is what FSDP2 did."""
    expected, ranks = outcome
    for found, one in zip(ranks[0][layout][key], expected[key], strict=True):
        assert_close_metrics(found, one, rel=rel)


def assert_all_the_same(outcome, layout, key):
    assert all(rank[layout][key] == outcome[1][0][layout][key] for rank in outcome[1])


def test_the_softmax_over_a_split_vocabulary_is_that_of_float64(outcome):
    assert max(rank["softmax"] for rank in outcome[1]) < 1e-5


@pytest.mark.parametrize("layout", DENSE)
def test_ppo_with_critic_and_reference_is_that_of_fsdp(outcome, layout):
    expected, ranks = outcome
    assert_all_the_same(outcome, layout, "ppo")
    assert_close_steps(outcome, layout, "ppo", rel=1e-3)
    for one in expected["ppo"]:
        assert dict(one["means"]).keys() >= {"critic/loss", "critic/explained_variance", "train/kl_reference"}
    assert_close_weights(outcome, layout, "ppo_weights")
    both = {key: value for rank in ranks for key, value in rank[layout]["kl"].items()}
    assert both == pytest.approx(expected["kl"], abs=1e-4)


@pytest.mark.parametrize("layout", MIXTURE)
def test_corrections_fitted_over_an_update_are_those_of_fsdp(outcome, layout):
    assert_close_steps(outcome, layout, "mixture", rel=1e-3)


@pytest.mark.parametrize("layout", MIXTURE)
def test_the_load_balancing_loss_is_that_of_fsdp(outcome, layout):
    """Its value, and its gradient by the norm and by the routers after two steps."""
    assert_all_the_same(outcome, layout, "balanced")
    assert_close_steps(outcome, layout, "balanced")
    assert all(dict(one["means"])["train/router_balance"] > 1 for one in outcome[0]["balanced"])
    assert_close_weights(outcome, layout, "balanced_weights")


@pytest.mark.parametrize("layout", MIXTURE)
def test_replayed_experts_are_those_of_fsdp(outcome, layout):
    """Log-probabilities, and two steps with the load-balancing loss, whose experts the routers choose themselves."""
    expected, ranks = outcome
    found = {key: value for rank in ranks for key, value in rank[layout]["replayed_logprobs"].items()}
    assert found.keys() == expected["replayed_logprobs"].keys()
    for key, one in expected["replayed_logprobs"].items():
        np.testing.assert_allclose(found[key], one, atol=1e-4)
    gaps = [np.abs(found[key] - one) for key, one in expected["free_logprobs"].items()]
    assert np.concatenate(gaps).mean() > 0.05, "other experts are another function"
    assert_close_steps(outcome, layout, "replayed")
    assert_close_weights(outcome, layout, "replayed_weights")


@pytest.mark.parametrize("layout", list(DENSE)[1:])
def test_a_checkpoint_of_another_layout_goes_on(outcome, layout):
    """Weights, moments and the number of steps of policy and critic."""
    expected, ranks = outcome
    assert_all_the_same(outcome, layout, "resumed")
    assert_close_metrics(ranks[0][layout]["resumed"], expected["last"], rel=1e-3)
    assert_close_metrics(ranks[0][layout]["resumed"], ranks[0][layout]["last"], rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_state_on_the_host_changes_nothing(outcome, dtype):
    for rank in outcome[1]:
        on_device, on_host = (rank["dp2"]["offload"][f"{dtype}-{offload}"] for offload in (False, True))
        assert on_host["steps"] == on_device["steps"]
        assert all(map(all, on_host["moved"]))
        assert len(on_host["moved"]) == 6, "two minibatches in each of three epochs"
        assert on_host["returned"]
        assert not any(map(any, on_device["moved"]))
        assert on_device["weights"] or rank is not outcome[1][0], "the first rank sends"
        for name, weight in on_device["weights"].items():
            for found in (on_host["weights"], on_host["resumed_weights"], on_device["resumed_weights"]):
                assert np.array_equal(found[name], weight), name


@pytest.mark.parametrize("layout", DENSE)
def test_a_nan_in_one_plan_stops_all_ranks(outcome, layout):
    assert [rank[layout]["refused"] for rank in outcome[1]] == ["RunFailed", "RunFailed"]


@pytest.mark.parametrize("layout", DENSE)
def test_a_plan_without_sequences_takes_part(outcome, layout):
    expected, ranks = outcome
    assert_close_metrics(ranks[0][layout]["lopsided"], expected["lopsided"], rel=1e-4)
