"""Environments of others are asked for by name: packages that are missing, rewards that nobody would ask."""

import sys

import pytest

from asyncrl.config.lengths import response_limit
from asyncrl.config.load import load_recipe
from asyncrl.environments import check_environment
from asyncrl.errors import ConfigError
from tests.unit.test_recipes import QUICKSTART

pytestmark = pytest.mark.unit

OTHERS = ("gymnasium", "openenv", "verifiers")


@pytest.mark.parametrize("name", OTHERS)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    recipe = load_recipe(QUICKSTART, [f"rollout.environment={name}", "reward.function=zero"])
    with pytest.raises(
        ConfigError, match=rf"the package {name} is not installed\ndo: +pip install 'asyncrl\[{name}\]'"
    ):
        check_environment(recipe)


def test_a_missing_package_of_mcp_servers_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    server = "rollout.tool_use.mcp={office: {command: [x]}}"
    recipe = load_recipe(QUICKSTART, ["rollout.environment=tool_use", server])
    with pytest.raises(ConfigError, match=r"the package mcp is not installed\ndo: +pip install 'asyncrl\[mcp\]'"):
        check_environment(recipe)


@pytest.mark.parametrize("name", OTHERS)
def test_an_environment_that_judges_takes_no_other_reward(name):
    with pytest.raises(ConfigError, match=r"gives the reward itself(?s:.)*reward\.function=zero"):
        load_recipe(QUICKSTART, [f"rollout.environment={name}", "reward.function=math"])
    with pytest.raises(ConfigError, match="nothing else teaches"):
        load_recipe(QUICKSTART, ["reward.function=zero"])


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        (["gymnasium", "rollout.gymnasium.max_turns=3", "rollout.gymnasium.max_observation_tokens=10"], 3 * 74),
        (["openenv", "rollout.openenv.max_turns=2", "rollout.openenv.max_observation_tokens=6"], 2 * 70),
        (["verifiers", "rollout.verifiers.max_turns=5"], 5 * 64),
        (["gymnasium", "rollout.tool_use.max_trajectory_tokens=90"], 90),
    ],
)
def test_the_longest_trajectory_follows_from_turns_and_observations(settings, limit):
    recipe = load_recipe(QUICKSTART, ["reward.function=zero", f"rollout.environment={settings[0]}", *settings[1:]])
    assert response_limit(recipe.rollout) == limit


def test_settings_of_others_may_be_nested():
    kwargs = "rollout.gymnasium.kwargs={maps: {small: [SF, FG], size: 2}}"
    recipe = load_recipe(QUICKSTART, ["rollout.environment=gymnasium", "reward.function=zero", kwargs])
    assert recipe.rollout.gymnasium.kwargs == {"maps": {"small": ["SF", "FG"], "size": 2}}
    with pytest.raises(ConfigError, match=r"rollout\.gymnasium\.kwargs\.maps\.size"):
        load_recipe(QUICKSTART, ["rollout.gymnasium.kwargs={maps: {size: .inf}}"])
