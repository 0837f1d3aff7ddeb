import pickle
import sys
from pathlib import Path

import pytest

from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.errors import ConfigError
from asyncrl.rewards import REWARDS, RewardResult, build_reward

pytestmark = pytest.mark.unit

ROW = PromptRow((ChatMessage("user", "?"),), "four  legs", "test", (), "f:1")

CUSTOM = """
from asyncrl.rewards import RewardResult

def length_reward(response, row):
    return RewardResult(float(len(response)), (("length", float(len(response))),))

def bare_number(response, row):
    return 1.0

def wrong_arguments(response):
    return RewardResult(0.0)

not_a_function = 3
"""


@pytest.fixture
def custom_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "reward_of_a_user.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    yield "reward_of_a_user"
    sys.modules.pop("reward_of_a_user", None)


def test_built_in_rewards_are_found_by_name() -> None:
    for name, function in REWARDS.items():
        assert build_reward(name) is function


def test_exact_reward_ignores_whitespace_only() -> None:
    exact = build_reward("exact")
    assert exact(" four legs\n", ROW) == RewardResult(1.0, (("correct", 1.0),))
    assert exact("four legs.", ROW).reward == 0.0
    assert exact("Four legs", ROW).reward == 0.0


def test_an_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"(?s)asked: reward.function=maths\n.*'math'"):
        build_reward("maths")


def test_a_function_of_the_user_is_used(custom_module: str) -> None:
    reward = build_reward(f"{custom_module}:length_reward")
    assert reward("abc", ROW) == RewardResult(3.0, (("length", 3.0),))
    assert pickle.loads(pickle.dumps(reward))("ab", ROW).reward == 2.0  # it travels to the rollouter's process


@pytest.mark.parametrize("target", ["missing_function", "not_a_function", "wrong_arguments"])
def test_what_is_no_reward_function_is_refused(custom_module: str, target: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.function={custom_module}:{target}"):
        build_reward(f"{custom_module}:{target}")


def test_a_missing_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="no_such_module_here"):
        build_reward("no_such_module_here:reward")


def test_a_result_of_another_type_names_reward_and_row(custom_module: str) -> None:
    with pytest.raises(TypeError, match=rf"(?s){custom_module}:bare_number of f:1.*float instead of RewardResult"):
        build_reward(f"{custom_module}:bare_number")("x", ROW)
