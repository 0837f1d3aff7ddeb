"""Router replay: the engine records what its model chose, and what is trained goes through just these experts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.config.trainer import FsdpConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.step.batch import pack
from asyncrl.types import decoder_of
from asyncrl_testing.backend_suite import VOCAB_SIZE, random_lease, weights_of, with_experts
from asyncrl_testing.engine_suite import Client, make_request
from asyncrl_testing.random_model import random_qwen3_moe, write_random_qwen3
from tests.numerics import one_rank
from tests.numerics.one_rank import embedded_engine, leased, plan_of, trajectory_of

pytestmark = pytest.mark.usefixtures("process_group")

LAYERS, EXPERTS, TOP = 2, 8, 2
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "head_dim": 8, "moe_intermediate_size": 16}


@pytest.fixture(scope="module", params=[True, False], ids=["normalised", "as they are"])
def norm_topk_prob(request):
    return request.param


def model_of(norm_topk_prob):
    return random_qwen3_moe(**SIZES, norm_topk_prob=norm_topk_prob)


@pytest.fixture(scope="module")
def path(tmp_path_factory, norm_topk_prob):
    root = tmp_path_factory.mktemp("mixture")
    model_of(norm_topk_prob).save_pretrained(root)
    return str(root)


def build(path, router_replay="rollout", **trainer):
    return one_rank.build(path, max_grad_norm=0, router_replay=router_replay, **trainer)


class Given(nn.Module):
    """The router of the test's own model: a softmax over all experts, of which the given ones are taken."""

    def __init__(self, gate, given, *, normalises):
        super().__init__()
        self.weight, self.given, self.normalises = gate.weight, given, normalises

    def forward(self, hidden):
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        own = logits.topk(TOP).indices
        taken = torch.where(self.given >= 0, self.given, own)
        shares = logits.softmax(-1) * torch.zeros_like(logits).scatter(-1, taken, 1.0)
        if self.normalises:
            shares = shares / shares.sum(-1, keepdim=True)
        return logits, shares.gather(-1, taken), taken


def own_logprobs(model, t, normalises):
    """[T] float64: one sequence, through the experts that it was sampled with."""
    given = torch.full((len(t.prompt_ids) + len(t.response_ids), LAYERS, TOP), -1)
    given[len(t.prompt_ids) - 1 : -1] = torch.from_numpy(t.extra["experts"].astype(np.int64))
    kept = [layer.mlp.gate for layer in model.model.layers]
    for place, layer in enumerate(model.model.layers):
        layer.mlp.gate = Given(kept[place], given[:, place], normalises=normalises)
    found = one_rank.single_logprobs(model, t)
    for layer, gate in zip(model.model.layers, kept, strict=True):
        layer.mlp.gate = gate
    return found


def routers_of(model):
    return [layer.mlp.gate for layer in decoder_of(model).layers]


def double(norm_topk_prob):
    model = model_of(norm_topk_prob)
    model.set_experts_implementation("eager")  # the other one has no float64
    return model.double().requires_grad_(True)


def perturb(router, seed, spread):
    """Moves the weights of a router in training."""
    weight = router.weight.to_local()  # one rank: all of it
    weight.add_(spread * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))


def test_log_probabilities_are_those_of_a_forward_pass_through_the_same_experts(path, norm_topk_prob):
    lease, model = with_experts(random_lease(0)), double(norm_topk_prob)
    found = build(path).logprobs(plan_of(lease, 64), lease.trajectories)
    padded = one_rank.build(path, router_replay="rollout", packing="padded")
    of_padded = padded.logprobs(plan_of(lease, 64), lease.trajectories)
    free = build(path, "off").logprobs(plan_of(lease, 64), lease.trajectories)
    gaps = []
    for key, t in lease.trajectories.items():
        with torch.no_grad():
            expected = own_logprobs(model, t, norm_topk_prob)
        torch.testing.assert_close(found[key].double(), expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(of_padded[key].double(), expected, atol=2e-5, rtol=1e-5)
        gaps.append((found[key] - free[key]).abs())
    assert torch.cat(gaps).mean() > 0.05, "other experts are another function"


@pytest.mark.parametrize(("budget", "recompute"), [(32, "none"), (4096, "none"), (4096, "selective"), (4096, "full")])
def test_a_step_has_the_gradient_of_that_function_for_every_packing(path, norm_topk_prob, budget, recompute):
    lease, model = with_experts(random_lease(0)), double(norm_topk_prob)
    loss, norm = one_rank.reference_step(model, lease, partial(own_logprobs, normalises=norm_topk_prob))
    gates = [layer.mlp.gate.weight.grad for layer in model.model.layers]
    assert all(g is not None and g.norm() > 1e-4 for g in gates), "the gradient reaches the routers"
    backend = build(path, recompute=recompute)
    before = weights_of(backend)
    metrics = backend.train_step(plan_of(lease, budget), lease.trajectories)
    assert metrics.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)
    moved = {name: np.abs(values - before[name]).max() for name, values in weights_of(backend).items()}
    routers = [name for name in moved if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS
    assert all(moved[name] > 1e-4 for name in routers)


def test_perturbed_routers_keep_the_recorded_experts(path):
    """The weights have moved on since the tokens were sampled: they go through their experts all the same."""
    lease, seen = with_experts(random_lease(1)), []
    found = {}
    for kind in ("rollout", "off"):
        backend = build(path, kind, fsdp=FsdpConfig(share_prompts=False))
        model = backend._policy.causal_lm
        with torch.no_grad():
            for router in routers_of(model):
                perturb(router, 5, 1.0)
        for layer in model.base_model.layers:
            layer.mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        plan = plan_of(lease, 4096)
        found[kind] = backend.logprobs(plan, lease.trajectories)
        if kind == "off":
            continue
        (microbatch,) = plan.microbatches
        batch = pack(microbatch, lease.trajectories, predict="response", device=torch.device("cpu"), extra=("experts",))
        asked = batch.tokens.experts
        assert asked.shape == (batch.num_tokens, LAYERS, TOP)
        assert 0.3 < (asked >= 0).double().mean() < 1
        for place, chosen in enumerate(seen):
            wanted = asked[:, place]
            assert torch.equal(chosen[wanted >= 0], wanted[wanted >= 0])
        seen.clear()
    gap = torch.cat([(found["rollout"][key] - found["off"][key]).abs() for key in found["off"]])
    assert gap.mean() > 0.05
    has_some = asked[:, 0, 0] >= 0
    own = [(chosen.sort(-1).values != asked[:, place].sort(-1).values) for place, chosen in enumerate(seen)]
    assert torch.stack(own)[:, has_some].double().mean() > 0.3, "the routers themselves would have chosen others"


def test_what_predicts_a_token_has_its_experts_and_prompts_have_their_own():
    """The last token of a prompt predicts the first of the response; the last of a response predicts nothing."""
    made = with_experts(random_lease(0, num_groups=1, group_size=2, max_response=6))
    plan = plan_of(made, 4096)
    (microbatch,) = plan.microbatches
    tokens = pack(
        microbatch, made.trajectories, predict="trained", device=torch.device("cpu"), extra=("experts",)
    ).tokens
    at = 0
    for sequence in microbatch:
        t = made.trajectories[sequence.ordinal, sequence.index]
        prompt, count = len(t.prompt_ids), len(t.response_ids)
        row = tokens.experts[at : at + prompt + count]
        first = prompt - 1
        assert row[first : first + count].tolist() == t.extra["experts"].tolist()
        assert (row[:first] == -1).all()
        assert (row[first + count :] == -1).all()
        at += prompt + count
    assert pack((), {}, predict="trained", device=torch.device("cpu"), extra=("experts",)).tokens.experts is None


def test_experts_of_another_model_and_models_without_routers_are_refused(path, tmp_path):
    lease = with_experts(random_lease(0))
    backend = build(path)
    for change, found in (
        (lambda e: e[:, :1], r"shape \(1, 2\)"),
        (lambda e: np.where(e >= 0, e + EXPERTS, e).astype(np.int16), "the largest 15"),
    ):
        other = {
            key: replace(t, extra={"experts": change(t.extra["experts"])}) for key, t in lease.trajectories.items()
        }
        with pytest.raises(ValueError, match=found):
            backend.train_step(plan_of(lease, 4096), other)
    with pytest.raises(ValueError, match="has no experts"):
        backend.train_step(plan_of(lease, 4096), random_lease(0).trajectories)
    write_random_qwen3(tmp_path, vocab_size=VOCAB_SIZE)
    with pytest.raises(ConfigError, match="has no experts"):
        build(str(tmp_path))


# -- with the engine ---------------------------------------------------------------------------------------------------


async def sampled(path, count=6, max_tokens=20):
    """Trajectories of the embedded engine, with recorded experts."""
    requests = [
        make_request(prompt=range(1, 3 + 4 * i), max_tokens=max_tokens + i, seed=i, experts=i != 1)
        for i in range(count)
    ]
    async with embedded_engine(path) as engine:
        done = [await client.done() for client in [Client(engine, request) for request in requests]]
    assert not any(chunk.extra for chunk in done[1].chunks), "it did not ask"
    return [trajectory_of(client, "experts") for i, client in enumerate(done) if i != 1]


async def test_the_engine_records_what_its_routers_chose_and_equal_weights_agree(path, norm_topk_prob):
    trajectories = await sampled(path)
    model, chosen = model_of(norm_topk_prob), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    for t in trajectories:
        chosen.clear()
        with torch.no_grad():
            model(input_ids=torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))[None])
        first = len(t.prompt_ids) - 1
        whole = torch.stack(chosen, 1)[first:-1].sort(-1).values
        same = whole == torch.from_numpy(t.extra["experts"].astype(np.int64)).sort(-1).values
        assert same.double().mean() > 0.99, "apart from near ties"
    plan, by_key = leased(trajectories, 0.0, 4096)
    found = build(path).logprobs(plan, by_key)
    for key, t in by_key.items():
        np.testing.assert_allclose(found[key].numpy(), t.logprobs, atol=1e-4)


async def test_replay_brings_perturbed_routers_closer_to_what_was_sampled(path):
    """As the weights of the next step: a little different routers choose other experts, and replay keeps them."""
    plan, by_key = leased(await sampled(path, count=8, max_tokens=40), 0.0, 4096)
    gaps = {}
    for kind in ("rollout", "off"):
        backend = build(path, kind)
        with torch.no_grad():
            for place, router in enumerate(routers_of(backend._policy.causal_lm)):
                perturb(router, place, 0.05)
        found = backend.logprobs(plan, by_key)
        gaps[kind] = float(np.mean(np.concatenate([np.abs(found[k].numpy() - t.logprobs) for k, t in by_key.items()])))
    assert gaps["rollout"] < 0.7 * gaps["off"]
