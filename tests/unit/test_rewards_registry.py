import asyncio
import sys
from pathlib import Path

import pytest

from asyncrl.config.rewards import RemoteRewardConfig, RewardConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.errors import ConfigError
from asyncrl.rewards import REWARDS, RewardResult, build_reward

pytestmark = pytest.mark.unit

ROW = PromptRow((ChatMessage("user", "?"),), "four  legs", "test", (), "f:1")

CUSTOM = """
import asyncio
from asyncrl.rewards import RewardResult

def length_reward(response, row):
    return RewardResult(float(len(response)), (("length", float(len(response))), ("correct", 0.5)))

def bare_number(response, row):
    return len(response)

async def waits(response, row):
    await asyncio.sleep(0)
    return RewardResult(float(id(asyncio.get_running_loop()) % 1000))

async def waits_bare(response, row):
    return True

def text(response, row):
    return "1.0"

def not_finite(response, row):
    return float("nan")

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


def build(name: str):
    return build_reward(RewardConfig(function=name))


def test_built_in_rewards_are_found_by_name() -> None:
    config = {"pattern": "x", "remote": RemoteRewardConfig(url="http://localhost:1/")}
    for name in REWARDS:
        assert callable(build_reward(RewardConfig(function=name, **config)))


def test_exact_reward_ignores_whitespace_only() -> None:
    exact = build("exact")
    assert exact(" four legs\n", ROW) == RewardResult(1.0, (("correct", 1.0),))
    assert exact("four legs.", ROW).reward == 0.0
    assert exact("Four legs", ROW).reward == 0.0


def test_an_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"(?s)asked: reward.function=maths\n.*'math'"):
        build("maths")
    with pytest.raises(ConfigError, match=r"(?s)asked: reward.parts=exakt\n.*'exact'"):
        build_reward(RewardConfig(parts={"math": 1.0, "exakt": 1.0}))


def test_a_function_of_the_user_is_used(custom_module: str) -> None:
    reward = build(f"{custom_module}:length_reward")
    assert reward("abc", ROW).reward == 3.0
    assert build(f"{custom_module}:bare_number")("abcd", ROW) == RewardResult(4.0)


def test_an_async_function_keeps_its_event_loop(custom_module: str) -> None:
    reward = build(f"{custom_module}:waits")
    assert reward("", ROW) == reward("", ROW)
    assert build(f"{custom_module}:waits_bare")("", ROW) == RewardResult(1.0)
    asyncio.set_event_loop(None)


@pytest.mark.parametrize("target", ["missing_function", "not_a_function", "wrong_arguments"])
def test_what_is_no_reward_function_is_refused(custom_module: str, target: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.function={custom_module}:{target}"):
        build(f"{custom_module}:{target}")


def test_a_missing_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="no_such_module_here"):
        build("no_such_module_here:reward")


def test_a_result_of_another_kind_names_reward_and_row(custom_module: str) -> None:
    with pytest.raises(TypeError, match=rf"(?s){custom_module}:text of f:1.*str instead of RewardResult"):
        build(f"{custom_module}:text")("x", ROW)
    with pytest.raises(ValueError, match=rf"(?s){custom_module}:not_finite of f:1.*nan"):
        build(f"{custom_module}:not_finite")("x", ROW)


def test_several_rewards_are_one_weighted_sum(custom_module: str) -> None:
    custom = f"{custom_module}:length_reward"
    reward = build_reward(RewardConfig(parts={custom: 0.25, "exact": 2.0, "math": -1.0}))
    result = reward("four legs", ROW)
    assert result.reward == pytest.approx(0.25 * 9 + 2.0 * 1)
    assert result.parts == (
        ("correct", 0.5),  # of the first that has one
        (custom, 9.0),
        (f"{custom}.length", 9.0),
        ("exact", 1.0),
        ("math", 0.0),
        ("math.answered", 0.0),
    )


def test_settings_that_cannot_be_used_are_named() -> None:
    with pytest.raises(ConfigError, match=r"(?s)asked: reward.pattern=\(.*missing \)"):
        build_reward(RewardConfig(function="regex", pattern="("))
    with pytest.raises(ConfigError, match=r"reward.remote.url is not set"):
        RewardConfig(parts={"remote": 1.0})
    with pytest.raises(ConfigError, match=r"reward.pattern is not set"):
        RewardConfig(function="regex")
