import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import build_advantage
from asyncrl.algorithms.grpo import grpo_advantages
from asyncrl.algorithms.maxrl import maxrl_advantages
from asyncrl.algorithms.overlong import shaped_rewards
from asyncrl.config.algorithm import OverlongConfig
from asyncrl.config.algorithm_parts import ADVANTAGES
from asyncrl.errors import ConfigError

RAW = ("gae", "reinforce_plus_plus")
RELATIVE = sorted(set(ADVANTAGES) - set(RAW))
rewards = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)
never_negative = st.lists(st.floats(0, 100, width=32), min_size=2, max_size=16)


def paper(name, r):
    """Each advantage as its paper writes it, one trajectory at a time."""
    n, mean = len(r), sum(r) / len(r)
    match name:
        case "grpo":
            spread = (sum((x - mean) ** 2 for x in r) / n) ** 0.5
            return [(x - mean) / (spread + 1e-6) for x in r]
        case "dr_grpo" | "reinforce_plus_plus_baseline":
            return [x - mean for x in r]
        case "rloo":
            return [x - sum(y for j, y in enumerate(r) if j != i) / (n - 1) for i, x in enumerate(r)]
        case "maxrl":
            return [(x - mean) / mean if mean else 0.0 for x in r]
        case "gae" | "reinforce_plus_plus":
            return r
        case "teacher_only":
            return [0.0] * n


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(deadline=None, max_examples=60)
@given(values=never_negative)
def test_every_advantage_is_its_papers(name, values):
    if 0 < np.std(values) < 1e-3 or 0 < np.mean(values) < 1e-3:
        return  # rounding of the mean is what is left there
    found = build_advantage(name)(np.array(values))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, paper(name, values), rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(rewards)
def test_the_sample_standard_deviation_is_numpys_and_scales_every_advantage_alike(values):
    values = np.array(values)
    if values.std() < 1e-3:
        return  # EPSILON is visible there
    found = build_advantage("grpo", "sample")(values)
    np.testing.assert_allclose(found, (values - values.mean()) / (values.std(ddof=1) + 1e-6), rtol=1e-6, atol=1e-9)
    size = len(values)
    np.testing.assert_allclose(found, grpo_advantages(values) * ((size - 1) / size) ** 0.5, rtol=3e-3, atol=1e-9)


@pytest.mark.parametrize(("name", "std"), [*((name, "population") for name in RELATIVE), ("grpo", "sample")])
@settings(deadline=None, max_examples=60)
@given(reward=st.floats(0, 1e6), size=st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(name, std, reward, size):
    advantage = build_advantage(name, std)
    assert (advantage(np.full(size, reward)) == 0).all()
    assert (advantage(np.full(size, np.float32(reward))) == 0).all()


@pytest.mark.parametrize("name", RELATIVE)
@settings(deadline=None, max_examples=60)
@given(values=never_negative, seed=st.integers(0, 99))
def test_the_order_of_a_group_does_not_matter(name, values, seed):
    if 0 < np.std(values) < 1e-3 or 0 < np.mean(values) < 1e-3:
        return  # the sum is rounded differently in another order, and the rest is divided by next to nothing
    values, order = np.array(values), np.random.default_rng(seed).permutation(len(values))
    advantage = build_advantage(name)
    np.testing.assert_allclose(advantage(values[order]), advantage(values)[order], rtol=1e-6, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(rewards)
def test_centred_ordered_and_bounded(values):
    values = np.array(values)
    found = grpo_advantages(values)
    assert np.isfinite(found).all()
    # rounding of the mean is divided by the spread, and so is what is left of it
    assert abs(found.sum()) <= 1e-9 * len(values) * (1 + abs(values).max() / (values.std() + 1e-6))
    assert abs(found).max() <= np.sqrt(len(values)) + 1e-6
    order = np.argsort(values, kind="stable")
    assert (np.diff(found[order]) >= 0).all()


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ConfigError, match="a reward of -1"):
        maxrl_advantages(np.array([1.0, -1.0]))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [[1.0, 0.0]], [float("inf"), 0.0]])
def test_malformed_rewards_are_refused(name, bad):
    with pytest.raises(ValueError, match="rewards"):
        build_advantage(name)(np.array(bad))


def test_names_are_looked_up():
    assert build_advantage("grpo") is grpo_advantages
    with pytest.raises(ConfigError, match="grpo"):
        build_advantage("grppo")


DAPO = OverlongConfig(buffer_tokens=4096, penalty=1.0)


def dapo_equation_13(length, longest=20480, cache=4096):
    if length <= longest - cache:
        return 0.0
    return (longest - cache - length) / cache if length <= longest else -1.0


def test_the_overlong_penalty_is_dapos():
    lengths = [0, 1, 16383, 16384, 16385, 18432, 20479, 20480, 20481, 50000]
    found = shaped_rewards([1.0] * len(lengths), lengths, DAPO, 20480)
    np.testing.assert_allclose(found, [1 + dapo_equation_13(n) for n in lengths], rtol=1e-12)
    assert found[5] == 0.5
    half = shaped_rewards([0.0], [20480], OverlongConfig(buffer_tokens=4096, penalty=0.5), 20480)
    assert half.tolist() == [-0.5]


def test_without_a_buffer_rewards_are_as_they_were():
    rewards = (1.0, -2.0)
    assert shaped_rewards(rewards, (99, 0), OverlongConfig(), 10).tolist() == [1.0, -2.0]


def test_every_reward_has_its_length():
    with pytest.raises(ValueError, match="lengths"):
        shaped_rewards([1.0], [5, 6], DAPO, 20480)
