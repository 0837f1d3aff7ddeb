"""What every loss of the shelf must do at the edges: ratio 1, huge ratios, empty masks, junk under the mask."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms import build_loss
from asyncrl.algorithms.loss import MAX_LOG_RATIO, bounded_ratio
from asyncrl.config.algorithm import AlgorithmConfig, SapoConfig
from asyncrl.config.algorithm_parts import LOSSES
from tests.numerics.losses import draw

SAPO = SapoConfig(temperature_positive=0.8)
CONFIGS = {
    name: AlgorithmConfig(loss=name, clip_low=0.2, clip_high=0.28, dual_clip=3.0 * spec.has_dual_clip, sapo=SAPO)
    for name, spec in LOSSES.items()
}
every_loss = pytest.mark.parametrize("loss", [pytest.param(build_loss(c), id=name) for name, c in CONFIGS.items()])


def run(loss, tokens, dtype=torch.float64):
    inputs = tokens.torch(dtype)
    values = loss(inputs)
    values.sum().backward()
    return values.detach().numpy(), inputs.logprobs.grad.numpy(), loss.clipped(inputs).numpy()


@every_loss
def test_at_ratio_1_it_is_the_policy_gradient(loss):
    t = draw(0)
    values, gradient, clipped = run(loss, t.with_(old_logprobs=t.logprobs))
    np.testing.assert_allclose(gradient, np.where(t.mask, -t.advantages, 0), rtol=1e-12)
    assert not clipped.any()
    assert values[~t.mask].tolist() == [0.0] * (~t.mask).sum()


@every_loss
@pytest.mark.parametrize("distance", [-1e4, -200.0, 30.0, 200.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_ratios_stay_finite(loss, distance, dtype):
    t = draw(1)
    values, gradient, clipped = run(loss, t.with_(old_logprobs=t.logprobs - distance), dtype)
    assert np.isfinite(values).all()
    assert np.isfinite(gradient).all()
    assert abs(gradient).max() <= np.exp(MAX_LOG_RATIO) * abs(t.advantages).max() * 1.001
    if loss.__class__.__name__ == "Dppo":  # a ratio is no divergence: rare tokens stay, with a bounded weight
        assert abs(gradient).max() <= 20 * abs(t.advantages).max()
    else:
        assert distance < 0 or clipped[t.mask & (t.advantages > 0)].all()


@every_loss
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "behavior_logprobs", "advantages", "reference"])
def test_masked_tokens_contribute_nothing_whatever_they_hold(loss, junk, field):
    t = draw(2)
    dirty = getattr(t, field).copy()
    dirty[~t.mask] = junk
    for clean, found in zip(run(loss, t), run(loss, t.with_(**{field: dirty})), strict=True):
        np.testing.assert_array_equal(clean, found)
        assert not found[~t.mask].any()


@every_loss
def test_an_all_masked_sequence_changes_nothing_for_the_others(loss):
    t = draw(5, sizes=(5, 4, 6), masked=0)
    hidden = t.with_(mask=t.sequences != 1)
    without = hidden.pick(np.flatnonzero(hidden.mask))
    for found, expected in zip(run(loss, hidden), run(loss, without), strict=True):
        np.testing.assert_array_equal(found[hidden.mask], expected)


@every_loss
def test_zero_advantages_have_no_gradient(loss):
    t = draw(6)
    _, gradient, clipped = run(loss, t.with_(advantages=np.zeros_like(t.advantages)))
    assert not gradient.any()
    assert loss.__class__.__name__ == "Cispo" or not clipped.any()


def test_the_bounded_ratio_is_exp_below_the_bound_and_keeps_a_gradient_above():
    x = torch.tensor([-1e4, -3.0, 0.0, 19.0, 25.0, 1e4], dtype=torch.float64, requires_grad=True)
    y = bounded_ratio(x)
    expected = np.exp(np.minimum(x.detach().numpy(), MAX_LOG_RATIO))
    np.testing.assert_allclose(y.detach().numpy(), expected)
    y.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), expected)
