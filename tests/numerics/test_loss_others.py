"""GSPO, CISPO, SAPO and DPPO against their papers' formulas in float64 numpy, gradients by finite differences."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms import build_loss
from asyncrl.algorithms.cispo import Cispo
from asyncrl.algorithms.dppo import Dppo
from asyncrl.algorithms.gspo import Gspo
from asyncrl.algorithms.loss import MAX_LOG_RATIO, bounded_ratio
from asyncrl.algorithms.sapo import Sapo
from asyncrl.config.algorithm import AlgorithmConfig, DppoConfig, SapoConfig
from asyncrl.config.algorithm_parts import LOSSES
from asyncrl.errors import ConfigError
from tests.numerics.losses import draw, slopes


def sequence_ratios(t, logprobs):
    """GSPO eq. 7: exp of the mean log ratio over the trained tokens, one per trajectory."""
    ratios = []
    for tokens in t.trajectories():
        trained = tokens[t.mask[tokens]]
        ratios.append(np.exp((logprobs - t.old_logprobs)[trained].mean()) if len(trained) else 1.0)
    return np.array(ratios)


def gspo(t, logprobs, low, high):
    """GSPO-token, eq. 13 and 14; what stands under sg is taken at `t.logprobs`."""
    ratio = sequence_ratios(t, t.logprobs)[t.sequences] * np.exp(logprobs - t.logprobs)
    return np.where(t.mask, -np.minimum(ratio * t.advantages, ratio.clip(1 - low, 1 + high) * t.advantages), 0)


def cispo(t, logprobs, low, high):
    """MiniMax-M1 eq. 4 and 5; the weight stands under sg."""
    weight = np.exp(t.logprobs - t.old_logprobs).clip(1 - low, 1 + high)
    return np.where(t.mask, -weight * t.advantages * logprobs, 0)


def sapo(t, logprobs, positive, negative):
    ratio = np.exp(logprobs - t.old_logprobs)
    tau = np.where(t.advantages > 0, positive, negative)
    return np.where(t.mask, -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * t.advantages, 0)


def coins_apart(t, divergence):
    """DPPO eq. 13 and 14 at `t.logprobs`, q of the policy that sampled."""
    p, q = np.exp(t.logprobs), np.exp(t.old_logprobs)
    if divergence == "tv":
        return np.abs(q - p)
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


def left_behind(t, low, high, divergence):
    apart = coins_apart(t, divergence)
    risen = (t.advantages > 0) & (t.logprobs > t.old_logprobs) & (apart > high)
    return t.mask & (risen | ((t.advantages < 0) & (t.logprobs < t.old_logprobs) & (apart > low)))


def dppo(t, logprobs, low, high, divergence, max_ratio):
    """Appendix C of the paper with the bound of its code; mask and weight stand under sg."""
    weight = np.minimum(np.exp(t.logprobs - t.old_logprobs), max_ratio)
    kept = t.mask & ~left_behind(t, low, high, divergence)
    return np.where(kept, -weight * t.advantages * logprobs, 0)


CASES = [
    pytest.param(Dppo, dppo, (0.02, 0.03, "tv", 20.0), id="dppo-tv"),
    pytest.param(Dppo, dppo, (0.002, 0.001, "kl", 20.0), id="dppo-kl"),
    pytest.param(Dppo, dppo, (1.0, 1.0, "tv", 1.1), id="dppo-truncated"),
    pytest.param(Gspo, gspo, (0.1, 0.15), id="gspo"),
    pytest.param(Gspo, gspo, (3e-4, 4e-4), id="gspo-tight"),
    pytest.param(Cispo, cispo, (0.2, 0.28), id="cispo"),
    pytest.param(Cispo, cispo, (1.0, 4.0), id="cispo-wide"),
    pytest.param(Sapo, sapo, (1.0, 1.05), id="sapo"),
    pytest.param(Sapo, sapo, (5.0, 0.5), id="sapo-far"),
]


@pytest.mark.parametrize(("loss", "paper", "settings"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_are_the_papers(loss, paper, settings, seed):
    t = draw(seed)
    inputs = t.torch()
    tokens = loss(*settings)(inputs)
    np.testing.assert_allclose(tokens.detach().numpy(), paper(t, t.logprobs, *settings), rtol=1e-11, atol=1e-15)
    (tokens * inputs.weights).sum().backward()
    expected = slopes(lambda x: (paper(t, x, *settings) * t.weights).sum(), t.logprobs)
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), expected, atol=2e-7)


def test_gspo_summed_over_a_trajectory_has_the_gradient_of_the_sequence_form():
    """Eq. 5: min(s A, clip(s) A) of each trajectory, through the mean of its log ratios."""
    t, low, high = draw(3), 0.1, 0.15
    advantages = np.array([t.advantages[tokens[0]] for tokens in t.trajectories()])

    def sequence_form(logprobs):
        s = sequence_ratios(t, logprobs)
        return -np.minimum(s * advantages, s.clip(1 - low, 1 + high) * advantages).sum()

    sizes = np.array([t.mask[tokens].sum() for tokens in t.trajectories()])
    s = sequence_ratios(t, t.logprobs)
    cut = ((advantages > 0) & (s > 1 + high)) | ((advantages < 0) & (s < 1 - low))
    assert cut[sizes > 0].any()
    assert not cut[sizes > 0].all()
    inputs = t.torch()
    (Gspo(low, high)(inputs) / torch.tensor(sizes.clip(1))[inputs.sequences]).sum().backward()
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), slopes(sequence_form, t.logprobs), atol=1e-8)


def test_gspo_counts_the_tokens_of_clipped_trajectories():
    t = draw(3)
    s = sequence_ratios(t, t.logprobs)[t.sequences]
    cut = t.mask & (((t.advantages > 0) & (s > 1.15)) | ((t.advantages < 0) & (s < 0.9)))
    assert cut.any()
    assert (cut != t.mask).any()
    np.testing.assert_array_equal(Gspo(0.1, 0.15).clipped(t.torch()).numpy(), cut)


def test_cispo_counts_weights_at_a_bound_and_leaves_no_token_without_gradient():
    t = draw(4)
    ratio = np.exp(t.logprobs - t.old_logprobs)
    bound = t.mask & ((ratio > 1.28) | (ratio < 0.8))
    assert bound.any()
    inputs = t.torch()
    loss = Cispo(0.2, 0.28)
    np.testing.assert_array_equal(loss.clipped(inputs).numpy(), bound)
    loss(inputs).sum().backward()
    assert (inputs.logprobs.grad.numpy()[t.mask] != 0).all()


def test_sapo_counts_gradients_below_half_of_the_plain_ratios():
    t = draw(5, spread=0.6)
    inputs = t.torch()
    loss = Sapo(2.0, 3.0)
    loss(inputs).sum().backward()
    plain = -np.exp(t.logprobs - t.old_logprobs) * t.advantages
    halved = t.mask & (np.abs(inputs.logprobs.grad.numpy()) < np.abs(plain) / 2)
    assert halved.any()
    assert (halved != t.mask).any()
    np.testing.assert_array_equal(loss.clipped(inputs).numpy(), halved)


@pytest.mark.parametrize(("divergence", "low", "high"), [("tv", 0.02, 0.03), ("kl", 0.002, 0.001)])
def test_dppo_counts_what_has_left_the_trust_region(divergence, low, high):
    t = draw(6)
    expected = left_behind(t, low, high, divergence)
    assert 0 < expected.sum() < t.mask.sum()
    inputs = t.torch()
    loss = Dppo(low, high, divergence)
    np.testing.assert_array_equal(loss.clipped(inputs).numpy(), expected)
    loss(inputs).sum().backward()
    np.testing.assert_array_equal(inputs.logprobs.grad.numpy() == 0, expected | ~t.mask)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_lets_rare_tokens_move_and_holds_likely_ones(divergence):
    """The clipped surrogate does the reverse with both."""
    t = draw(7, sizes=(2,), masked=0)
    p, q = np.array([0.02, 0.80]), np.array([0.001, 0.99])
    t = t.with_(logprobs=np.log(p), old_logprobs=np.log(q), advantages=np.array([1.0, -1.0]))
    config = AlgorithmConfig(loss="dppo", dppo=DppoConfig(divergence=divergence))
    assert Dppo.of(config).clipped(t.torch()).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dppo_by_kl_is_finite_at_certain_tokens(dtype):
    certain = np.array([0.0, 0.0, -1e-9, -30.0, 0.0])
    t = draw(8, sizes=(5,), masked=0).with_(logprobs=certain, old_logprobs=np.array([0.0, -1e-9, -30.0, 0.0, -40.0]))
    inputs = t.torch(dtype)
    loss = Dppo(0.05, 0.05, "kl")
    assert not loss.clipped(inputs)[:2].any()
    loss(inputs).sum().backward()
    assert inputs.logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("dppo", "message"), [({"low": -0.1}, "low"), ({"high": float("nan")}, "high"), ({"max_ratio": 0.5}, "max_ratio")]
)
def test_bounds_of_dppo_that_mean_nothing_are_refused(dppo, message):
    with pytest.raises(ConfigError, match=message):
        DppoConfig(**dppo)


def test_dppo_around_another_policy_than_the_one_that_sampled_is_refused():
    with pytest.raises(ConfigError, match="around the policy that sampled"):
        AlgorithmConfig(loss="dppo", ratio="proximal")


# -- edges of every loss -----------------------------------------------------------------------------------------------


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
