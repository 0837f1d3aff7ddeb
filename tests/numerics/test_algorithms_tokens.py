"""Token advantages, whitening, the critic's loss, KL and the proximal policy against float64 numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.algorithms.clipped_surrogate import ClippedSurrogate
from asyncrl.algorithms.gae import gae_advantages
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.loss import MAX_LOG_RATIO
from asyncrl.algorithms.proximal import log_linear
from asyncrl.algorithms.returns import discounted_returns, token_rewards, whitened, whitening_sums
from asyncrl.algorithms.value_loss import value_clipped, value_loss
from tests.numerics.losses import draw, slopes

SIZES = (1, 7, 30, 2, 1, 25, 40)


def trajectories(seed, sizes=SIZES):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=n), rng.normal(size=n)) for n in sizes]


def packed(parts, dtype=torch.float64):
    """Rewards, values and trajectory numbers of all trajectories one after the other."""
    rewards, values = (torch.tensor(np.concatenate(columns), dtype=dtype) for columns in zip(*parts, strict=True))
    return rewards, values, torch.tensor(np.repeat(np.arange(len(parts)), [len(r) for r, _ in parts]))


def gae_by_steps(rewards, values, gamma, lam):
    """Arxiv 1506.02438 eq. 16 as the recursion of every implementation, from the end."""
    advantages, after, value_after = np.zeros(len(rewards)), 0.0, 0.0
    for i in reversed(range(len(rewards))):
        after = rewards[i] + gamma * value_after - values[i] + gamma * lam * after
        advantages[i], value_after = after, values[i]
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.99, 0.7), (0.0, 1.0)])
def test_gae_is_the_recursion(gamma, lam):
    parts = trajectories(0)
    rewards, values, sequences = packed(parts)
    advantages, returns = gae_advantages(rewards, values, sequences, gamma, lam)
    expected = np.concatenate([gae_by_steps(r, v, gamma, lam) for r, v in parts])
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), expected + values.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_returns_are_discounted_sums(gamma):
    parts = trajectories(2)
    rewards, _, sequences = packed(parts)
    expected = [sum(gamma**k * x for k, x in enumerate(r[i:])) for r, _ in parts for i in range(len(r))]
    np.testing.assert_allclose(discounted_returns(rewards, sequences, gamma).numpy(), expected, rtol=1e-10, atol=1e-12)


def test_token_advantages_do_not_depend_on_the_packing_bit_for_bit():
    parts = trajectories(3)
    order = np.random.default_rng(0).permutation(len(parts))
    alone = [gae_advantages(*packed([p], torch.float32), 0.99, 0.95) for p in parts]
    together = gae_advantages(*packed([parts[i] for i in order], torch.float32), 0.99, 0.95)
    for k in range(2):
        assert torch.equal(torch.cat([alone[i][k] for i in order]), together[k])


def test_the_reward_is_earned_at_the_last_trained_token_and_penalties_on_the_way():
    totals = torch.tensor([2.0, 2.0, 2.0, -1.0, 5.0, 5.0])
    sequences = torch.tensor([0, 0, 0, 1, 3, 3])  # trajectory 2 has no trained token
    assert token_rewards(totals, sequences).tolist() == [0, 0, 2, -1, 0, 5]
    penalties = torch.full((6,), 0.25, requires_grad=True)
    earned = token_rewards(totals, sequences, penalties)
    assert not earned.requires_grad
    assert earned.tolist() == [-0.25, -0.25, 1.75, -1.25, -0.25, 4.75]
    assert discounted_returns(earned, sequences, 1.0).tolist() == [1.25, 1.5, 1.75, -1.25, 4.5, 4.75]


def test_no_tokens_give_no_advantages():
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert token_rewards(empty, none).shape == (0,)
    assert gae_advantages(empty, empty, none, 1.0, 1.0)[0].shape == (0,)


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="differ in shape"):
        gae_advantages(torch.zeros(3), torch.zeros(2), torch.zeros(3, dtype=torch.int64), 1.0, 1.0)
    with pytest.raises(ValueError, match="differ in shape"):
        value_loss(torch.zeros(3), torch.zeros(3), torch.zeros(2), torch.ones(3, dtype=torch.bool), clip=0.2)


def test_whitening_over_micro_batches_is_that_over_all_tokens():
    t = draw(0)
    values = t.advantages + 3.0
    junk = np.where(t.mask, values, np.nan)
    sums = sum(
        whitening_sums(torch.tensor(junk[part], dtype=torch.float32), torch.tensor(t.mask[part]))
        for part in np.array_split(np.arange(len(junk)), 4)
    )
    found = whitened(torch.tensor(values, dtype=torch.float32), sums)
    assert found.dtype == torch.float32
    kept = values.astype(np.float32).astype(np.float64)[t.mask]
    np.testing.assert_allclose(found.numpy()[t.mask], (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8), atol=2e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e4])
def test_whitening_equal_values_gives_nothing(value):
    values = torch.full((9,), value)
    assert whitened(values, whitening_sums(values, torch.ones(9, dtype=torch.bool))).abs().max() < 1e-6


def test_whitening_without_a_token_is_finite():
    values = torch.full((1,), 3.0)
    assert whitened(values, whitening_sums(values, torch.zeros(1, dtype=torch.bool))).isfinite().all()


def paper_value_loss(values, old, returns, mask, clip):
    held = np.clip(values, old - clip, old + clip) if clip else values
    return np.where(mask, np.maximum((values - returns) ** 2, (held - returns) ** 2) / 2, 0)


@pytest.mark.parametrize("clip", [0.0, 0.2, 5.0])
def test_the_value_loss_is_ppos(clip):
    t = draw(1)
    values, old, returns = t.logprobs, t.old_logprobs, t.behavior_logprobs + t.advantages
    tensor = torch.tensor(values, requires_grad=True)
    rest = [torch.tensor(x) for x in (old, returns, t.mask)]
    loss = value_loss(tensor, *rest, clip=clip)
    np.testing.assert_allclose(loss.detach().numpy(), paper_value_loss(values, old, returns, t.mask, clip), rtol=1e-12)
    (loss * torch.tensor(t.weights)).sum().backward()
    expected = slopes(lambda x: (paper_value_loss(x, old, returns, t.mask, clip) * t.weights).sum(), values)
    np.testing.assert_allclose(tensor.grad.numpy(), expected, atol=1e-7)
    cut = value_clipped(tensor, *rest, clip=clip).numpy()
    np.testing.assert_array_equal(cut, t.mask & (tensor.grad.numpy() == 0))
    assert cut.any() == (clip == 0.2)


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", [0, 1, 2])
def test_masked_values_contribute_nothing(junk, field):
    t = draw(2)
    fields = [torch.tensor(x) for x in (t.logprobs, t.old_logprobs, t.reference)]
    fields[field][~torch.tensor(t.mask)] = junk
    values = fields[0].requires_grad_()
    loss = value_loss(values, fields[1], fields[2], torch.tensor(t.mask), clip=0.2)
    loss.sum().backward()
    expected = paper_value_loss(t.logprobs, t.old_logprobs, t.reference, t.mask, 0.2)
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-12)
    assert values.grad.isfinite().all()
    assert not values.grad.numpy()[~t.mask].any()


def paper_kl(logprobs, reference, mask, estimator):
    d = logprobs - reference
    value = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
    return np.where(mask, value, 0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_schulmans(estimator):
    t = draw(3)
    logprobs = torch.tensor(t.logprobs, requires_grad=True)
    found = kl_estimate(logprobs, torch.tensor(t.reference), estimator, torch.tensor(t.mask))
    np.testing.assert_allclose(
        found.detach().numpy(), paper_kl(t.logprobs, t.reference, t.mask, estimator), rtol=1e-9, atol=1e-15
    )
    found.sum().backward()
    expected = slopes(lambda x: paper_kl(x, t.reference, t.mask, estimator).sum(), t.logprobs)
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, atol=1e-7)


def test_k3_of_a_token_that_was_given_up_is_bounded_and_pulls_back():
    """The descent direction raises its probability, also where the bound holds."""
    logprobs = torch.tensor([-15.0, -30.0, -100.0, -1e4], dtype=torch.float64, requires_grad=True)
    found = kl_estimate(logprobs, torch.full_like(logprobs, -1.0), "k3", torch.ones(4, dtype=torch.bool))
    found.sum().backward()
    assert found.isfinite().all()
    assert (logprobs.grad < 0).all()
    assert logprobs.grad.abs().max() <= np.exp(MAX_LOG_RATIO)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_log_linear_policy_is_a3pos(dtype):
    t = draw(5)
    logprobs, behavior, lags = (torch.tensor(x, dtype=dtype) for x in (t.logprobs, t.behavior_logprobs, t.lags))
    found = log_linear(logprobs.requires_grad_(), behavior, lags)
    alpha = np.array([1 / max(d, 1) for d in t.lags])
    expected = alpha * t.behavior_logprobs + (1 - alpha) * t.logprobs
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-12)
    assert not found.requires_grad
    for lag in (0, 1):
        assert torch.equal(found[lags == lag], behavior[lags == lag])


@pytest.mark.parametrize("lag", [0.0, 1.0])
def test_a_fresh_token_that_earlier_updates_moved_far_is_held(lag):
    """By 2 nats: the surrogate is at its bound and pushes no further, as with the recomputed policy."""
    logprobs, behavior = torch.tensor([-1.0], requires_grad=True), torch.tensor([-3.0])
    old = log_linear(logprobs, behavior, torch.tensor([lag]))
    alone = {"logprobs": logprobs, "old_logprobs": old, "advantages": torch.ones(1), "mask": torch.tensor([True])}
    loss = ClippedSurrogate(0.2, 0.2)(replace(draw(1).torch(), **alone))
    loss.sum().backward()
    assert loss.item() == pytest.approx(-1.2)
    assert logprobs.grad.item() == 0
