"""The importance-weighted KL estimate: over a whole vocabulary it is the divergence, and so is its gradient."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms import build_objective
from asyncrl.algorithms.kl import importance_weighted, kl_estimate
from asyncrl.config.algorithm import AlgorithmConfig, KlConfig
from asyncrl.errors import ConfigError
from tests.numerics.losses import draw, slopes

EVERY = torch.ones(30, dtype=torch.bool)


def three_policies(seed=0):
    """Logits of the policy, and log-probabilities of the reference and of the policy that sampled."""
    g = torch.Generator().manual_seed(seed)
    logits, other, lagging = (torch.randn(30, generator=g, dtype=torch.float64) for _ in range(3))
    behavior = (logits + 0.7 * lagging).log_softmax(-1)
    return logits.requires_grad_(), other.log_softmax(-1), behavior


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_mean_and_gradient_over_the_vocabulary_are_those_of_the_divergence(estimator):
    logits, reference, behavior = three_policies()
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    estimate = importance_weighted(kl_estimate(logp, reference, estimator, EVERY), logp, behavior, EVERY)
    mean = (behavior.exp() * estimate).sum()
    assert mean.item() == pytest.approx((logp.exp() * (logp - reference)).sum().item(), rel=1e-10)
    (found,) = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(found, exact)


def test_the_objective_adds_the_weighted_estimate():
    t = draw(1)
    config = AlgorithmConfig(ratio="proximal", kl=KlConfig(coefficient=0.3, importance_weighted=True))
    objective = build_objective(config)

    def paper(logprobs):
        r, d = np.exp(logprobs - t.old_logprobs), logprobs - t.reference
        loss = -np.minimum(r * t.advantages, r.clip(0.8, 1.28) * t.advantages)
        kl = np.exp(logprobs - t.behavior_logprobs) * (np.exp(-d) - 1 + d)
        return (t.weights * (loss + 0.3 * kl))[t.mask].sum()

    inputs = t.torch()
    total, _ = objective(inputs)
    total.backward()
    assert total.item() == pytest.approx(paper(t.logprobs), rel=1e-12)
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), slopes(paper, t.logprobs), atol=2e-7)


@pytest.mark.parametrize("distance", [-200.0, 200.0, 1e4])
def test_huge_ratios_stay_finite(distance):
    t = draw(3).with_(behavior_logprobs=draw(3).logprobs - distance)
    inputs = t.torch(torch.float32)
    total, _ = build_objective(AlgorithmConfig(kl=KlConfig(coefficient=0.3, importance_weighted=True)))(inputs)
    total.backward()
    assert total.isfinite()
    assert inputs.logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kl", "message"),
    [
        ({"coefficient": 0.1, "place": "reward"}, "no divergence in the loss"),
        ({"coefficient": 0.0}, "no divergence in the loss"),
        ({"coefficient": 0.1, "estimator": "k2"}, "its mean is not the divergence"),
    ],
)
def test_where_it_would_mean_nothing_it_is_refused(kl, message):
    with pytest.raises(ConfigError, match=message):
        KlConfig(**kl, importance_weighted=True)
    KlConfig(coefficient=0.1, estimator="k1", importance_weighted=True)
