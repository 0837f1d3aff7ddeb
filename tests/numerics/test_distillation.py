"""On-policy distillation: over a whole vocabulary the gradient is that of the reverse KL, whoever sampled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div, linear
from transformers import AutoModelForCausalLM

from asyncrl.algorithms import build_advantage, build_objective
from asyncrl.algorithms.distillation import LEAST_TAIL, top_reverse_kl
from asyncrl.algorithms.loss import MAX_LOG_RATIO, LossInputs
from asyncrl.config.algorithm import AlgorithmConfig, DistillationConfig
from asyncrl.config.trainer import FsdpConfig
from asyncrl.trainer.token_logprobs import IMPOSSIBLE, LogitRules, logprobs_beside, token_logprobs
from asyncrl.types.metrics import Metric
from asyncrl_testing.backend_suite import VOCAB_SIZE, random_lease, weights_of, write_model
from tests.numerics import one_rank
from tests.numerics.losses import clipped_surrogate, draw

VOCABULARY = 30
UNCLIPPED = {"clip_low": 1.0, "clip_high": 1e6}


def config(coefficient=1.0, **rest):
    return AlgorithmConfig(advantage="teacher_only", distillation=DistillationConfig(coefficient=coefficient), **rest)


def every_token(logprobs, behavior, teacher):
    """One micro-batch with each token of the vocabulary once, weighted by how likely it was sampled."""
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=behavior,
        behavior_logprobs=behavior,
        advantages=torch.zeros(VOCABULARY, dtype=torch.float64),
        mask=torch.ones(VOCABULARY, dtype=torch.bool),
        weights=behavior.exp(),
        sequences=torch.zeros(VOCABULARY, dtype=torch.int64),
        lags=torch.zeros(VOCABULARY, dtype=torch.float64),
        entropy=torch.zeros(VOCABULARY, dtype=torch.float64),
        teacher_logprobs=teacher,
    )


@pytest.mark.parametrize("lag", [0.0, 0.7])
def test_the_gradient_over_the_vocabulary_is_that_of_the_reverse_kl(lag):
    g = torch.Generator().manual_seed(3)
    logits, other, lagging = (torch.randn(VOCABULARY, generator=g, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    teacher, behavior = other.log_softmax(-1), (logits.detach() + lag * lagging).log_softmax(-1)
    logp = logits.log_softmax(-1)
    reverse_kl = torch.nn.functional.kl_div(teacher, logp, log_target=True, reduction="sum")
    (exact,) = torch.autograd.grad(reverse_kl, logits, retain_graph=True)
    total, seen = build_objective(config(0.5, **UNCLIPPED))(every_token(logp, behavior, teacher))
    (found,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(found, 0.5 * exact)
    assert dict(seen.sums)[Metric.KL_TEACHER] == pytest.approx((logp - teacher).sum().item())


def test_what_rewards_give_is_added_and_masked_tokens_hold_anything():
    t = draw(4)
    teacher = torch.tensor(t.reference)
    teacher[~torch.tensor(t.mask)] = torch.nan
    inputs = replace(t.torch(), reference_logprobs=None, teacher_logprobs=teacher)
    total, _ = build_objective(AlgorithmConfig(distillation=DistillationConfig(coefficient=0.3)))(inputs)
    loss = clipped_surrogate(t.with_(advantages=t.advantages - 0.3 * (t.logprobs - t.reference)), t.logprobs)
    assert total.item() == pytest.approx((t.weights * loss)[t.mask].sum())
    total.backward()
    assert inputs.logprobs.grad is not None
    assert torch.isfinite(inputs.logprobs.grad).all()


def test_a_token_that_the_teacher_excludes_counts_only_so_much():
    t = draw(5)
    far = replace(t.torch(), reference_logprobs=None, teacher_logprobs=torch.full((len(t.mask),), -1e4).double())
    total, _ = build_objective(config(**UNCLIPPED))(far)
    r = np.exp(t.logprobs - t.old_logprobs)
    assert total.item() == pytest.approx((t.weights * r * (MAX_LOG_RATIO - t.advantages))[t.mask].sum())


def test_without_a_teacher_the_advantage_is_zero():
    assert build_advantage("teacher_only")(np.array([0.0, 1.0, 5.0])).tolist() == [0, 0, 0]


# -- the teacher's likeliest tokens ------------------------------------------------------------------------------------


N, V = 20, 30


def draw_top(seed, spread=2.0, dtype=torch.float64):
    """Logits of the policy, with gradient, and the teacher's log-probabilities, [N, V] each."""
    g = torch.Generator().manual_seed(seed)
    own, teacher = (spread * torch.randn(N, V, generator=g, dtype=dtype) for _ in range(2))
    return own.requires_grad_(), teacher.log_softmax(-1)


def of_top(logits, teacher, k):
    """[N]: the divergence over the teacher's k likeliest tokens."""
    top = teacher.topk(k)
    return top_reverse_kl(logits.log_softmax(-1).gather(-1, top.indices), top.values, torch.ones(N, dtype=torch.bool))


def of_buckets(logits, teacher, k):
    """[N]: the dense formula over k + 1 outcomes, by torch's own KL."""
    own, kept = logits.log_softmax(-1), teacher.argsort(-1, descending=True)
    own, teacher = (values.gather(-1, kept) for values in (own, teacher))
    merged = [torch.cat([x[:, :k], x[:, k:].logsumexp(-1, keepdim=True)], -1) for x in (own, teacher)]
    return kl_div(merged[1], merged[0], log_target=True, reduction="none").sum(-1)


def of_whole(logits, teacher):
    """[N]: the reverse KL."""
    return kl_div(teacher, logits.log_softmax(-1), log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("k", [1, 3, 12, V - 1, V])
def test_value_and_gradient_are_those_of_the_dense_formula_over_top_k_and_the_rest(k):
    """Over the whole vocabulary it is the reverse KL: one token that is left out is a bucket of its own."""
    logits, teacher = draw_top(0)
    found = of_top(logits, teacher, k)
    expected = of_buckets(logits, teacher, k) if k < V - 1 else of_whole(logits, teacher)
    torch.testing.assert_close(found, expected)
    (gradient,), (wanted,) = (torch.autograd.grad(x.sum(), logits) for x in (found, expected))
    torch.testing.assert_close(gradient, wanted)
    assert gradient.abs().max() > 0.01


def test_a_teacher_that_leaves_nothing_and_masked_rows_keep_everything_finite():
    certain = torch.zeros(2, 1)
    logits = torch.tensor([[-3.0, -3.0, 2.0], [0.0, 0.0, 0.0]]).requires_grad_()
    own = logits.log_softmax(-1)[:, :1]
    found = top_reverse_kl(own, certain, torch.ones(2, dtype=torch.bool))
    found.sum().backward()
    assert found.max().item() < 2 - np.log(LEAST_TAIL)
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 2] > 0.01, "the bucket still pulls"
    anything = torch.full((2, 1), torch.nan)
    values = own.detach().clone().requires_grad_()
    masked = top_reverse_kl(values, anything, torch.tensor([False, False]))
    masked.sum().backward()
    assert masked.tolist() == [0, 0]
    assert values.grad.tolist() == [[0], [0]]
    with pytest.raises(ValueError, match="differ in shape"):
        top_reverse_kl(own, certain[:1], torch.ones(2, dtype=torch.bool))


# -- the output layer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_other_tokens_of_a_place_have_value_and_gradient(chunk_rows):
    """Beside the targets, also where a token is among both, or named twice."""
    g = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(*shape, generator=g) for shape in ((N, 8), (V, 8), (V,)))
    targets, others = torch.randint(0, V, (N,), generator=g), torch.randint(0, V, (N, 5), generator=g)
    others[:, 0], others[0, 1] = targets, others[0, 2]
    upstream = torch.randn(N, generator=g), torch.randn(N, generator=g), torch.randn(N, 5, generator=g)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    found = logprobs_beside(*leaves, targets, others, temperature=0.7, rules=LogitRules(chunk_rows * V))
    dense = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logp = (linear(*dense) / 0.7).log_softmax(-1)
    wanted = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), logp.gather(-1, others)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
    sum((x * u).sum() for x, u in zip(found, upstream, strict=True)).backward()
    sum((x * u.double()).sum() for x, u in zip(wanted, upstream, strict=True)).backward()
    for a, b in zip(leaves, dense, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, atol=5e-5, rtol=1e-4)


def test_tokens_of_a_larger_vocabulary_have_probability_zero_and_no_gradient():
    g = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(2, 8, generator=g).requires_grad_(), torch.randn(V, 8, generator=g)
    others = torch.tensor([[V, 3], [V + 100, V - 1]])
    targets = torch.tensor([0, 1])
    _, _, found = logprobs_beside(hidden, weight, None, targets, others, temperature=1.0)
    assert found[:, 0].tolist() == [IMPOSSIBLE, IMPOSSIBLE]
    assert found[:, 0].exp().tolist() == [0, 0]
    found[:, 0].sum().backward()
    assert hidden.grad.abs().max() == 0
    alone, _ = token_logprobs(hidden, weight, None, torch.tensor([3, V - 1]), temperature=1.0)
    torch.testing.assert_close(found[:, 1], alone)


# -- in training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("policy"))


def build(path, top_k, coefficient=0.5, lr=1e-3, **fsdp):
    distillation = DistillationConfig(coefficient=coefficient, top_k=top_k)
    algorithm = AlgorithmConfig(advantage="teacher_only", distillation=distillation)
    return one_rank.build(path, algorithm, lr=lr, max_grad_norm=0, fsdp=FsdpConfig(**fsdp))


def taught(lease, k, seed=9):
    """The lease without advantages, with a teacher's arrays; and that teacher's log-probabilities, [T, V] each."""
    g, whole, groups = torch.Generator().manual_seed(seed), {}, []
    for group in lease.groups:
        members = []
        for index, t in enumerate(group.trajectories):
            logp = (2 * torch.randn(len(t.response_ids), VOCAB_SIZE, generator=g)).log_softmax(-1)
            top, ids = logp.topk(k), torch.from_numpy(t.response_ids.astype(np.int64))
            extra = {
                "teacher_logprobs": logp.gather(-1, ids[:, None])[:, 0].numpy(),
                "top_ids": top.indices.numpy().astype(np.int32),
                "top_logprobs": top.values.numpy(),
            }
            members.append(replace(t, extra=extra).validate())
            whole[group.ordinal, index] = logp
        groups.append(replace(group, trajectories=tuple(members)))
    nothing = tuple(np.zeros_like(a) for a in lease.advantages)
    return replace(lease, groups=tuple(groups), advantages=nothing), whole


def dense_step(path, lease, whole, coefficient):
    """Loss and norm of the gradient in float64, sequence by sequence, over the whole vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    count = sum(t.num_trained_tokens for t in lease.trajectories.values())
    loss = 0.0
    for key, t in lease.trajectories.items():
        if not t.num_trained_tokens:
            continue
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)[len(t.prompt_ids) - 1 : -1]
        each = kl_div(whole[key].double(), logp, log_target=True, reduction="none").sum(-1)
        part = coefficient * each[torch.from_numpy(t.loss_mask)].sum() / count
        part.backward()
        loss += part.item()
    return loss, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("budget", "shared"), [(32, False), (4096, False), (4096, True)])
def test_a_step_over_the_whole_vocabulary_is_the_dense_one_for_every_packing(path, budget, shared):
    lease, whole = taught(random_lease(0), VOCAB_SIZE)
    loss, norm = dense_step(path, lease, whole, 0.5)
    plan = one_rank.plan_of(lease, budget)
    metrics = build(path, VOCAB_SIZE, share_prompts=shared).train_step(plan, lease.trajectories)
    assert metrics.loss == pytest.approx(loss, rel=1e-4)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)
    assert metrics.mean(Metric.KL_TEACHER_TOP) == pytest.approx(loss / 0.5, rel=1e-4)
    assert Metric.KL_TEACHER in dict(metrics.means)


@pytest.mark.usefixtures("process_group")
def test_steps_bring_the_policy_to_the_teachers_top_k_and_a_lack_of_them_is_named(path):
    lease, _ = taught(random_lease(1), 6)
    backend = build(path, 6, coefficient=1.0, lr=1e-2)
    before = weights_of(backend)
    (plan,) = lease.plans()
    seen = [backend.train_step(plan, lease.trajectories).mean(Metric.KL_TEACHER_TOP) for _ in range(20)]
    assert seen[-1] < 0.9 * seen[0]
    assert any((before[name] != values).any() for name, values in weights_of(backend).items())
    lacking = {
        key: replace(t, extra={"teacher_logprobs": t.extra["teacher_logprobs"]})
        for key, t in lease.trajectories.items()
    }
    with pytest.raises(ValueError, match="has no top_ids"):
        backend.train_step(plan, lacking)
