"""Trajectories with branches: loss and gradient against a reference that knows only the tree, one token after another.

A policy of a Qwen3 in float32 is trained on two groups. The reference computes every sampled token by a plain forward
pass over all that came before it, and adds the formulas of the documents up by hand.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms import build_advantage
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.trainer import FsdpConfig
from asyncrl.queue.masking import StoredGroup, summarize
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.types import LeaseManifest, Segment, Trajectory, TrajectoryGroup
from asyncrl_testing.backend_suite import VOCAB_SIZE, weights_of, write_model
from tests.numerics.one_rank import build

pytestmark = pytest.mark.usefixtures("process_group")

LOW, HIGH = 0.2, 0.28
FIXED = 16


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def sequence(draw, prompt, *parts, reward=0.0):
    """`parts`: token counts of the policy's turns, with two tokens of the environment between two of them."""
    mask, segments = [], []
    for i, count in enumerate(parts):
        if i:
            segments.append(Segment(len(mask), len(mask) + 2, 0, 0, "environment"))
            mask += [False] * 2
        segments.append(Segment(len(mask), len(mask) + count, 0, 0))
        mask += [True] * count
    ids = draw.integers(0, VOCAB_SIZE, len(mask)).astype(np.int32)
    logprobs = np.where(mask, -np.log(VOCAB_SIZE) + 0.4 * draw.normal(size=len(mask)), 0).astype(np.float32)
    return Trajectory(np.asarray(prompt, np.int32), ids, logprobs, np.array(mask), tuple(segments), reward)


def tree(draw, prompt, *, reward, fork, conversation):
    """A conversation of two turns; `fork`: another second turn after its first one, `conversation`: one of its own."""
    main = sequence(draw, prompt, 4, 3, reward=reward)
    branches = []
    if fork:
        after = np.concatenate([prompt, main.response_ids[:4], draw.integers(0, VOCAB_SIZE, 2)])
        branches.append(sequence(draw, after, 5, 2))
    if conversation:
        branches.append(sequence(draw, draw.integers(0, VOCAB_SIZE, 6), 6))
    return replace(main, branches=tuple(branches)).validate()


def drawn(seed=0, *, branches=True):
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, VOCAB_SIZE, n).astype(np.int32) for n in (5, 3)]
    kinds = [[(True, True), (False, False), (True, False)], [(False, True), (False, False), (False, False)]]
    groups = [
        TrajectoryGroup(
            i,
            0,
            tuple(
                tree(draw, prompts[i], reward=r, fork=fork and branches, conversation=own and branches)
                for r, (fork, own) in zip((1.0, 0.0, 0.5), kinds[i], strict=True)
            ),
        )
        for i in range(2)
    ]
    return [group.validate() for group in groups]


def own_logprobs(model, trajectory):
    """[trained tokens], each from a forward pass over all tokens before it."""
    whole = np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int64)
    found = []
    for i in np.flatnonzero(trajectory.loss_mask):
        at = len(trajectory.prompt_ids) + i
        logits = model(input_ids=torch.from_numpy(whole[:at])[None]).logits[0, -1]
        found.append(logits.double().log_softmax(-1)[whole[at]])
    return torch.stack(found)


def token_losses(loss, logprobs, old, advantage):
    """[trained tokens of one branch]."""
    log_ratio = logprobs - old
    if loss == "gspo":  # the mean is over the tokens of the branch, and has no gradient
        log_ratio = log_ratio.detach().mean() + logprobs - logprobs.detach()
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)


def reference(model, groups, loss, aggregation):
    """Loss and norm of the gradient; the gradient stays in the model."""
    sizes = [[sum(int(s.loss_mask.sum()) for s in t.sequences) for t in group.trajectories] for group in groups]
    trajectories, tokens = sum(map(len, sizes)), sum(map(sum, sizes))
    total = torch.zeros((), dtype=torch.float64)
    for group, counts in zip(groups, sizes, strict=True):
        rewards = np.array([t.reward for t in group.trajectories])
        advantages = (rewards - rewards.mean()) / rewards.std()
        for trajectory, advantage, count in zip(group.trajectories, advantages, counts, strict=True):
            weight = {"token_mean": tokens, "sequence_mean": trajectories * count, "fixed": trajectories * FIXED}
            for branch in trajectory.sequences:
                old = torch.from_numpy(branch.logprobs[branch.loss_mask]).double()
                losses = token_losses(loss, own_logprobs(model, branch), old, advantage)
                total = total + losses.sum() / weight[aggregation]
    total.backward()
    return total.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


def trained(model_path, groups, loss, aggregation, *, share, budget=48):
    """The backend after a step over the groups, and the metrics of the step."""
    algorithm = AlgorithmConfig(loss=loss, clip_low=LOW, clip_high=HIGH, aggregation=aggregation)
    backend = build(model_path, algorithm, max_grad_norm=0, fsdp=FsdpConfig(share_prompts=share))
    manifest = LeaseManifest(0, tuple(summarize(StoredGroup(g, 0), g, step=0, max_lag=0) for g in groups))
    advantage = build_advantage("grpo")
    rules = PackingRules(
        num_plans=1,
        max_tokens_per_microbatch=budget,
        aggregation=aggregation,
        fixed_tokens=FIXED,
        share_prompts=share,
    )
    (plan,) = plan_step(manifest, [advantage(np.array(g.rewards)) for g in manifest.groups], rules)
    found = {(g.ordinal, i): s for g in groups for i, s in enumerate(g.sequences)}
    return backend, backend.train_step(plan, found), plan


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed"])
@pytest.mark.parametrize("loss", ["clipped_surrogate", "gspo"])
def test_loss_gradient_and_update_are_those_of_the_tree(model_path, loss, aggregation, share):
    groups = drawn()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    expected, norm = reference(model, groups, loss, aggregation)
    torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    backend, metrics, _ = trained(model_path, groups, loss, aggregation, share=share)
    assert metrics.loss == pytest.approx(expected, abs=1e-6)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-5)
    assert metrics.trained_tokens == sum(s.num_trained_tokens for g in groups for s in g.sequences)
    updated = dict(model.named_parameters())
    for key, weight in weights_of(backend).items():
        difference = np.abs(weight - updated[key].detach().numpy())
        assert np.mean(difference > 1e-5) < 0.02, key


def test_a_fork_has_a_gradient_of_its_own(model_path):
    """Without the branches of the same trajectories the step is another one."""
    with_them, without = (
        trained(model_path, drawn(branches=branches), "clipped_surrogate", "token_mean", share=True)[1]
        for branches in (True, False)
    )
    assert with_them.grad_norm != pytest.approx(without.grad_norm, rel=1e-2)


def test_a_group_without_branches_is_planned_as_ever(model_path):
    """Every field of the plan is what the formulas for trajectories give, so the step is that of last_branch."""
    groups = drawn(branches=False)
    _, metrics, plan = trained(model_path, groups, "clipped_surrogate", "token_mean", share=True)
    planned = [s for run in plan.microbatches for s in run]
    assert sorted((s.ordinal, s.index) for s in planned) == [(i, j) for i in range(2) for j in range(3)]
    assert all(s.owner == s.index for s in planned)
    assert {s.token_weight for s in planned} == {1 / metrics.trained_tokens} == {1 / (6 * 7)}
