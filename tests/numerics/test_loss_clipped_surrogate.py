"""The clipped surrogate against the papers' formulas in float64 numpy, and its gradient against finite differences."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.algorithms import build_objective
from asyncrl.algorithms.clipped_surrogate import ClippedSurrogate
from asyncrl.config.algorithm import AlgorithmConfig
from tests.numerics.losses import draw, slopes

LOW, HIGH = 0.2, 0.28


def paper(t, logprobs, low=LOW, high=HIGH, dual=0.0):
    """PPO eq. 7 token by token: min(r A, clip(r, 1 - low, 1 + high) A), negated; dual clip: max of that and c A."""
    loss = np.zeros(len(logprobs))
    for i in np.flatnonzero(t.mask):
        r, a = np.exp(logprobs[i] - t.old_logprobs[i]), t.advantages[i]
        objective = min(r * a, min(max(r, 1 - low), 1 + high) * a)
        if dual and a < 0:
            objective = max(objective, dual * a)
        loss[i] = -objective
    return loss


def found(t, low=LOW, high=HIGH, dual=0.0, dtype=torch.float64):
    inputs = t.torch(dtype)
    return inputs, ClippedSurrogate(low, high, dual)(inputs)


@pytest.mark.parametrize("dual", [0.0, 1.3])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.0, 0.0), (1.0, 3.0)])
def test_value_and_gradient_are_the_papers(low, high, dual):
    t = draw(1)
    inputs, loss = found(t, low, high, dual)
    np.testing.assert_allclose(loss.detach().numpy(), paper(t, t.logprobs, low, high, dual), rtol=1e-12, atol=1e-15)
    (loss * inputs.weights).sum().backward()
    expected = slopes(lambda x: (paper(t, x, low, high, dual) * t.weights).sum(), t.logprobs)
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), expected, atol=1e-7)


def test_every_branch_occurs_and_is_counted():
    t = draw(1)
    ratio, a = np.exp(t.logprobs - t.old_logprobs), t.advantages
    far = 1.3
    branches = [
        (a > 0) & (ratio > 1 + HIGH),
        (a > 0) & (ratio < 1 - LOW),
        (a < 0) & (ratio > far),
        (a < 0) & (ratio > 1 + HIGH) & (ratio < far),
        (a < 0) & (ratio < 1 - LOW),
    ]
    assert all((branch & t.mask).any() for branch in branches)
    cut = ClippedSurrogate(LOW, HIGH).clipped(t.torch()).numpy()
    np.testing.assert_array_equal(cut, (branches[0] | branches[4]) & t.mask)
    cut = ClippedSurrogate(LOW, HIGH, far).clipped(t.torch()).numpy()
    np.testing.assert_array_equal(cut, (branches[0] | branches[2] | branches[4]) & t.mask)
    inputs, loss = found(t, dual=far)
    loss.sum().backward()
    np.testing.assert_array_equal(inputs.logprobs.grad.numpy() == 0, cut | ~t.mask)


def test_float32_is_enough():
    t = draw(2)
    _, loss = found(t, dtype=torch.float32)
    np.testing.assert_allclose(loss.detach().numpy(), paper(t, t.logprobs), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["old_logprobs", "advantages", "mask"])
def test_lengths_that_differ_are_refused(name):
    inputs = draw(6).torch()
    with pytest.raises(ValueError, match=rf"differ in shape: .*{name} \(1,\)"):
        ClippedSurrogate(LOW, HIGH)(replace(inputs, **{name: getattr(inputs, name)[:1]}))


def test_the_configured_loss_has_the_configured_bounds():
    t = draw(7)
    objective = build_objective(AlgorithmConfig(clip_low=0.1, clip_high=0.5, dual_clip=2.0))
    value, _ = objective(t.torch())
    assert value.item() == pytest.approx((paper(t, t.logprobs, 0.1, 0.5, 2.0) * t.weights).sum(), rel=1e-12)
