"""The examples of docs/environments.md run as they are written."""

import re
from pathlib import Path

import pytest

from asyncrl.environments.agent import AgentEnvironment
from asyncrl.environments.tools import build_tools
from tests.contract.test_tool_use import recipe_with
from tests.environments import ScriptedSession, assert_exact, chat_with, opened, task_of

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def example(name, tmp_path, monkeypatch):
    """The module with the example that has `name`, importable under a name of its own."""
    [source] = [e for e in EXAMPLES if name in e]
    module = f"example_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return module, source


async def test_the_environment(tmp_path, monkeypatch):
    module, source = example("SecondLook", tmp_path, monkeypatch)
    assert source.count("\n") <= 40
    environment = getattr(__import__(module), "SecondLook")()  # noqa: B009
    chat = chat_with()
    session = ScriptedSession(chat, "5", "6")
    trajectory = await environment.run(task_of(chat.encode("what?")), session)
    assert_exact(trajectory, session)
    assert dict(trajectory.reward_parts)["changed"] == 1
    assert session.rewarded == ["6"]


async def test_the_game(tmp_path, monkeypatch):
    pytest.importorskip("textarena", reason="TextArena is not installed: pip install textarena")
    module, _ = example("GuessTheNumber", tmp_path, monkeypatch)
    environment = getattr(__import__(module), "GuessTheNumber")()  # noqa: B009
    session = ScriptedSession(chat_with(), *(f"[{number}]" for number in (1, 2, 3, 4)))
    trajectory = await environment.run(task_of([1]), session)
    assert_exact(trajectory, session)
    assert environment.judges
    assert trajectory.turns == 4


async def test_the_tool(tmp_path, monkeypatch):
    module, _ = example("Thermometer", tmp_path, monkeypatch)
    [tool] = build_tools(recipe_with(f"rollout.tool_use.tools=[{module}:Thermometer]").rollout.tool_use)
    tool.start()
    assert tool.call(place="Oslo") == "4"


async def test_the_agent(tmp_path, monkeypatch):
    module, _ = example("solve", tmp_path, monkeypatch)
    recipe = recipe_with("rollout.environment=agent", f"rollout.agent.function={module}:solve")
    chat = chat_with()
    async with opened(AgentEnvironment(recipe, chat)) as environment:
        session = ScriptedSession(chat, "a plan", "5")
        trajectory = await environment.run(task_of([1], "2+3?"), session)
    assert_exact(trajectory, session)
    assert session.rewarded == ["5"]
