"""Environments of the released verifiers, whose agent asks our endpoint."""

import asyncio
import json

import pytest

from asyncrl.environments import check_environment
from asyncrl.errors import ConfigError, DataError, GenerationError
from tests.contract.test_tool_use import recipe_with, text_of
from tests.environments import ScriptedSession, assert_exact, chat_with, task_of
from tests.unit.test_recipes import ROOT

WHY = "verifiers is not installed: pip install 'asyncrl[verifiers]', in an environment of its own"
pytest.importorskip("verifiers.v1", reason=WHY)
pytestmark = [pytest.mark.environments, pytest.mark.timeout(400)]

DOUBLING = {"taskset": {"id": "doubling-taskset"}, "agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "plugins"))


def recipe_of(env, *overrides):
    own = ("rollout.environment=verifiers", "reward.function=zero", f"rollout.verifiers.env={json.dumps(env)}")
    return recipe_with(*own, *overrides)


async def play(environment, *replies, **extra):
    session = ScriptedSession(chat_with(), *replies)
    async with asyncio.timeout(60):
        return await environment.run(task_of([1], "Double it.", **extra), session), session


async def test_an_episode_is_recorded_token_by_token_and_judged_by_its_task(started):
    environment = await started(recipe_of(DOUBLING))
    trajectory, session = await play(environment, "5", "6", task=2)
    assert_exact(trajectory, session)
    assert session.rewarded == [], "no other reward is asked"
    assert trajectory.reward == pytest.approx(1 + 0.1 / 2)
    assert dict(trajectory.reward_parts) == {
        "is_double": 1,
        "is_short": 0.5,
        "metric.turns": 2,
        "agent_requests": 2,
        "agent_branches": 1,
        "agent_trained_share": 1,
    }
    assert text_of(session, trajectory.prompt_ids).endswith("3 + 3 = ?<|im_end|>\n<|im_start|>assistant\n")
    assert text_of(session, trajectory.response_ids) == (
        "5<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n6<|im_end|>"
    )


async def test_many_episodes_run_side_by_side_each_with_its_own_key(started):
    environment = await started(recipe_of(DOUBLING))
    played = await asyncio.gather(*(play(environment, "?", str(2 * n + 2), task=n) for n in range(7)))
    assert [dict(t.reward_parts)["is_double"] for t, _ in played] == [1.0] * 7
    for trajectory, session in played:
        assert_exact(trajectory, session)


async def test_the_task_is_that_of_the_row_or_follows_from_the_ordinal(started):
    environment = await started(recipe_of(DOUBLING))
    trajectory, session = await play(environment, "1", "2")
    assert "1 + 1 = ?" in text_of(session, trajectory.prompt_ids)
    with pytest.raises(DataError, match=r"task 8 of the row at test:1(?s:.)*has 8 tasks"):
        await play(environment, task=8)


async def test_an_episode_that_fails_fails_its_attempt_with_what_it_said(started):
    environment = await started(recipe_of(DOUBLING))
    with pytest.raises(GenerationError, match="nobody doubles eight"):
        await play(environment, task=7)


async def test_an_episode_that_meets_a_limit_is_cut_off(started):
    environment = await started(recipe_of(DOUBLING, "rollout.verifiers.max_turns=1"))
    trajectory, session = await play(environment, "5", task=2)
    assert_exact(trajectory, session)
    assert (trajectory.turns, trajectory.finish_reason, trajectory.reward) == (1, "length", 0)


def test_an_environment_that_is_not_there_is_refused_before_the_run():
    check_environment(recipe_of(DOUBLING))
    for env, found in (
        ({}, "needs a seed taskset"),
        ({"taskset": {"id": "no-such-taskset"}}, "not found"),
        ({**DOUBLING, "agents": {}}, "agents"),
    ):
        with pytest.raises(ConfigError, match=found):
            check_environment(recipe_of(env))
