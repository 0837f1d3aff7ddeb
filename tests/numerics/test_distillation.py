"""On-policy distillation: over a whole vocabulary the gradient is that of the reverse KL, whoever sampled."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.algorithms import build_advantage, build_objective
from asyncrl.algorithms.loss import MAX_LOG_RATIO, LossInputs
from asyncrl.config.algorithm import AlgorithmConfig, DistillationConfig
from asyncrl.types.metrics import Metric
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
