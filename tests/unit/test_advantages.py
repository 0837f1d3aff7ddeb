import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms import build_advantage
from asyncrl.algorithms.grpo import grpo_advantages
from asyncrl.errors import ConfigError

pytestmark = pytest.mark.unit

rewards = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


def test_two_against_two():
    np.testing.assert_allclose(grpo_advantages(np.array([1.0, 0.0, 0.0, 1.0])), [1, -1, -1, 1], rtol=1e-5)


def test_one_against_three():
    # mean 1/4, population standard deviation sqrt(3)/4
    found = grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(found, np.array([3, -1, -1, -1]) / 3**0.5, rtol=1e-5)


@given(st.floats(-1e6, 1e6), st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(reward, size):
    assert (grpo_advantages(np.full(size, reward)) == 0).all()
    assert (grpo_advantages(np.full(size, np.float32(reward))) == 0).all()


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


@given(rewards, st.floats(0.5, 4), st.floats(-10, 10))
def test_neither_scale_nor_offset_matters(values, scale, offset):
    values = np.array(values)
    if values.std() < 1e-2:
        return  # EPSILON is visible there
    np.testing.assert_allclose(grpo_advantages(values), grpo_advantages(scale * values + offset), atol=5e-4)


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [[1.0, 0.0]], [float("inf"), 0.0]])
def test_malformed_rewards_are_refused(bad):
    with pytest.raises(ValueError, match="rewards"):
        grpo_advantages(np.array(bad))


def test_names_are_looked_up():
    assert build_advantage("grpo") is grpo_advantages
    with pytest.raises(ConfigError, match="grpo"):
        build_advantage("grppo")


def test_the_coordinator_gets_advantages_and_plans_without_torch_or_ray():
    code = (
        "import sys, asyncrl.algorithms as a, asyncrl.trainer.packing; a.build_advantage('grpo');"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_pool_reaches_the_driver_without_torch():
    code = "import sys, asyncrl.trainer.pool; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
