"""The clipped surrogate against the paper's formula in float64 numpy, and its gradient against finite differences."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms import build_loss
from asyncrl.algorithms.clipped_surrogate import clipped_surrogate, surrogate_statistics
from asyncrl.algorithms.loss import LossInputs
from asyncrl.config.algorithm import AlgorithmConfig

pytestmark = pytest.mark.numerics

LOW, HIGH = 0.2, 0.28


def paper(logp, behavior, advantage, mask, low=LOW, high=HIGH):
    """PPO eq. 7 token by token: min(r A, clip(r, 1 - low, 1 + high) A), negated and summed."""
    total = 0.0
    for lp, mu, a, m in zip(logp, behavior, advantage, mask, strict=True):
        if m:
            r = np.exp(lp - mu)
            total -= min(r * a, min(max(r, 1 - low), 1 + high) * a)
    return total


def tokens(seed=0, n=200):
    draw = np.random.default_rng(seed)
    logp = -draw.uniform(0.01, 5, n)
    behavior = np.minimum(logp + draw.normal(0, 0.3, n), -1e-3)
    return logp, behavior, draw.normal(size=n), draw.random(n) < 0.7


def as_torch(logp, behavior, advantage, mask, dtype=torch.float32):
    logprobs = torch.tensor(logp, dtype=dtype, requires_grad=True)
    return logprobs, torch.tensor(behavior, dtype=dtype), torch.tensor(advantage, dtype=dtype), torch.tensor(mask)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.0, 0.0), (1.0, 3.0)])
def test_value_is_the_papers(low, high):
    data = tokens()
    found = clipped_surrogate(*as_torch(*data), clip_low=low, clip_high=high)
    assert found.item() == pytest.approx(paper(*data, low, high), rel=1e-5)


def test_all_four_branches_occur_and_gradient_is_the_papers():
    logp, behavior, advantage, mask = tokens(1)
    ratio = np.exp(logp - behavior)
    for branch in (
        (advantage > 0) & (ratio > 1 + HIGH),
        (advantage > 0) & (ratio < 1 - LOW),
        (advantage < 0) & (ratio > 1 + HIGH),
        (advantage < 0) & (ratio < 1 - LOW),
    ):
        assert (branch & mask).any()
    inputs = as_torch(logp, behavior, advantage, mask, torch.float64)
    clipped_surrogate(*inputs, clip_low=LOW, clip_high=HIGH).backward()
    step = 1e-6
    for i in range(len(logp)):
        up, down = logp.copy(), logp.copy()
        up[i] += step
        down[i] -= step
        slope = (paper(up, behavior, advantage, mask) - paper(down, behavior, advantage, mask)) / (2 * step)
        assert inputs[0].grad[i].item() == pytest.approx(slope, abs=1e-7)


def test_gradient_at_equal_policies_is_the_policy_gradient():
    """At ratio 1 PPO is REINFORCE: the gradient is minus the advantage."""
    logp, _, advantage, mask = tokens(2)
    inputs = as_torch(logp, logp, advantage, mask)
    clipped_surrogate(*inputs, clip_low=LOW, clip_high=HIGH).backward()
    np.testing.assert_allclose(inputs[0].grad.numpy(), -advantage * mask, rtol=1e-6)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("field", [0, 1, 2])
def test_masked_tokens_contribute_nothing_whatever_they_hold(field, junk):
    data = tokens(3)
    clean, dirty = as_torch(*data), list(as_torch(*data))
    with torch.no_grad():
        dirty[field][~dirty[3]] = junk
    losses = [clipped_surrogate(*x, clip_low=LOW, clip_high=HIGH) for x in (clean, dirty)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    assert torch.equal(clean[0].grad, dirty[0].grad)
    seen = [surrogate_statistics(LossInputs(*x), clip_low=LOW, clip_high=HIGH) for x in (clean, dirty)]
    for name in ("clipped", "ratio", "kl", "ratio_max"):
        assert getattr(seen[0], name).item() == getattr(seen[1], name).item()


def test_statistics_against_numpy():
    logp, behavior, advantage, mask = tokens(4)
    seen = surrogate_statistics(LossInputs(*as_torch(logp, behavior, advantage, mask)), clip_low=LOW, clip_high=HIGH)
    ratio, a = np.exp(logp - behavior)[mask], advantage[mask]
    assert seen.clipped.item() == (((a > 0) & (ratio > 1 + HIGH)) | ((a < 0) & (ratio < 1 - LOW))).sum()
    assert seen.ratio.item() == pytest.approx(ratio.sum(), rel=1e-5)
    assert seen.kl.item() == pytest.approx((behavior - logp)[mask].sum(), rel=1e-4)
    assert seen.ratio_max.item() == pytest.approx(ratio.max(), rel=1e-5)
    assert not any(getattr(seen, name).requires_grad for name in ("clipped", "ratio", "kl", "ratio_max"))


def test_an_empty_mask_is_zero_with_zero_gradient():
    logp, behavior, advantage, mask = tokens(5)
    inputs = as_torch(logp, behavior, advantage, np.zeros_like(mask))
    loss = clipped_surrogate(*inputs, clip_low=LOW, clip_high=HIGH)
    loss.backward()
    assert loss.item() == 0
    assert (inputs[0].grad == 0).all()
    assert surrogate_statistics(LossInputs(*inputs), clip_low=LOW, clip_high=HIGH).ratio_max.item() == 0


def test_lengths_that_differ_are_refused():
    logprobs, behavior, advantages, mask = as_torch(*tokens(6))
    with pytest.raises(ValueError, match="differ in shape"):
        clipped_surrogate(logprobs, behavior[:1], advantages, mask, clip_low=LOW, clip_high=HIGH)
    with pytest.raises(ValueError, match="differ in shape"):
        clipped_surrogate(logprobs, behavior, advantages[:1], mask, clip_low=LOW, clip_high=HIGH)


def test_the_configured_loss_has_the_configured_bounds():
    data = tokens(7)
    loss = build_loss(AlgorithmConfig(clip_low=0.1, clip_high=0.5))
    assert loss(LossInputs(*as_torch(*data))).item() == pytest.approx(paper(*data, 0.1, 0.5), rel=1e-5)
    seen = loss.statistics(LossInputs(*as_torch(*data)))
    ratio, a = np.exp(data[0] - data[1]), data[2]
    assert seen.clipped.item() == ((((a > 0) & (ratio > 1.5)) | ((a < 0) & (ratio < 0.9))) & data[3]).sum()
