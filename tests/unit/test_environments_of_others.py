"""Environments of others are asked for by name: packages that are missing, rewards that nobody would ask."""

import importlib.metadata
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from asyncrl.config.rollout import response_limit
from asyncrl.environments import check_environment
from asyncrl.environments.custom import PACKAGES
from asyncrl.environments.observation import MAX_TEXT_CHARS, for_policy
from asyncrl.errors import ConfigError
from tests.environments import chat_with
from tests.make import ROOT, quickstart

OTHERS = ("gymnasium", "openenv", "verifiers")


USES_MCP = ["rollout.environment=tool_use", "rollout.tool_use.mcp={office: {command: [x]}}"]


@pytest.mark.parametrize("name", [*OTHERS, "mcp"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    uses = USES_MCP if name == "mcp" else [f"rollout.environment={name}", "reward.function=zero"]
    missing = rf"the package {name} is not installed\ndo: +pip install 'asyncrl\[{name}\]'"
    with pytest.raises(ConfigError, match=missing):
        check_environment(quickstart(*uses))


@pytest.mark.parametrize("version", ["1.30.0", "3.0.0"])
def test_a_package_in_a_version_that_does_not_fit_is_refused(monkeypatch, tmp_path, version):
    """A package of that name and version comes first on the path."""
    (tmp_path / "mcp.py").write_text("")
    info = tmp_path / f"mcp-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mcp\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mcp", raising=False)
    assert importlib.metadata.version("mcp") == version
    with pytest.raises(ConfigError) as refused:
        check_environment(quickstart(*USES_MCP))
    assert f"found: mcp {version}, needed {PACKAGES['mcp'][2]}\n" in str(refused.value)
    assert "pip install 'asyncrl[mcp]'" in str(refused.value)


def test_the_versions_are_those_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, (_, extra, versions) in PACKAGES.items():
        needed = Requirement(extras[extra][0])
        assert (needed.name, needed.specifier) == (package, SpecifierSet(versions))


def test_a_text_of_any_size_is_cut_before_it_is_tokenized():
    chat = chat_with()
    shown = for_policy(chat, "a b " * MAX_TEXT_CHARS, 5)
    most = len(chat.encode("a b " * (MAX_TEXT_CHARS // 4)))
    assert shown.endswith(f"[cut: the first 5 of more than {most} tokens]")


class Asks:
    async def run(self, task, session): ...


class Judges(Asks):
    judges = True


@pytest.mark.parametrize("name", OTHERS)
def test_an_environment_that_judges_takes_no_other_reward(name):
    own = f"rollout.environment={__name__}:Judges"
    check_environment(quickstart("reward.function=zero", own))
    with pytest.raises(ConfigError, match="`judges = True`"):
        check_environment(quickstart("reward.function=zero", own.replace("Judges", "Asks")))
    with pytest.raises(ConfigError, match=r"gives the reward itself(?s:.)*reward\.function=zero"):
        quickstart(f"rollout.environment={name}", "reward.function=math")


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
    recipe = quickstart("reward.function=zero", f"rollout.environment={settings[0]}", *settings[1:])
    assert response_limit(recipe.rollout) == limit


def test_settings_of_others_may_be_nested():
    kwargs = "rollout.gymnasium.kwargs={maps: {small: [SF, FG], size: 2}}"
    recipe = quickstart("rollout.environment=gymnasium", "reward.function=zero", kwargs)
    assert recipe.rollout.gymnasium.kwargs == {"maps": {"small": ["SF", "FG"], "size": 2}}
