"""Environments behind a real OpenEnv server, played by a scripted policy."""

import asyncio
import json
import sys

import pytest

from asyncrl.environments import build_environment, check_environment
from asyncrl.errors import ConfigError, DeadlineExceeded, GenerationError
from tests.contract.test_tool_use import recipe_with, text_of
from tests.environments import ScriptedSession, assert_exact, chat_with, task_of
from tests.server_process import listening
from tests.unit.test_recipes import ROOT

WHY = "openenv is not installed: pip install 'asyncrl[openenv]', in an environment of its own"
pytest.importorskip("openenv.core.generic_client", reason=WHY)
pytestmark = [pytest.mark.environments, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def server():
    """The address of a server of guesses."""
    with listening(sys.executable, str(ROOT / "tests" / "openenv_server.py")) as (_, port):
        yield f"http://127.0.0.1:{port}"


def recipe_of(**settings):
    own = ("rollout.environment=openenv", "reward.function=zero", f"rollout.openenv={json.dumps(settings)}")
    return recipe_with(*own)


@pytest.fixture
def playing(started, server):
    """playing(**settings) -> environment."""
    usual = {"url": server, "action": "guess", "observation": "text"}
    return lambda **settings: started(recipe_of(**usual | settings))


async def play(environment, *replies, **extra):
    session = ScriptedSession(chat_with(), *replies)
    return await environment.run(task_of([1], "Guess it.", **extra), session), session


async def test_an_episode_is_recorded_token_by_token_and_rewarded_by_the_server(playing):
    environment = await playing()
    trajectory, session = await play(environment, "50", "75", "60", seed=60)
    assert_exact(trajectory, session)
    assert session.rewarded == []
    assert trajectory.reward == pytest.approx(0.9 + 0.85 + 1.0)
    assert dict(trajectory.reward_parts) == {"episode_ended": 1, "refused_actions": 0}
    assert "Guess it.\n\nGuess a number up to 99.<|im_end|>" in text_of(session, trajectory.prompt_ids)
    assert "50<|im_end|>\n<|im_start|>user\ntoo low<|im_end|>" in text_of(session, trajectory.response_ids)


async def test_actions_may_be_json_or_stand_in_a_tag(playing):
    environment = await playing(action="", observation="", reward="final")
    trajectory, session = await play(environment, "sixty", '{"guess": "60"}', seed=60)
    assert_exact(trajectory, session)
    assert trajectory.reward == 1
    assert dict(trajectory.reward_parts)["refused_actions"] == 1
    text = text_of(session, trajectory.response_ids)
    assert "Error: 'sixty' is no action. Write one JSON object." in text
    assert '"text": "Guess a number up to 99."}<' in text_of(session, trajectory.prompt_ids)
    environment = await playing(action_tag="go")
    trajectory, _ = await play(environment, "I go", "<go>1</go>, no: <go>60</go>!", seed=60)
    assert (trajectory.reward, dict(trajectory.reward_parts)["refused_actions"]) == (1, 1)


async def test_episodes_are_sessions_of_their_own_as_many_as_the_recipe_says(playing):
    environment = await playing(max_sessions=3)
    played = await asyncio.gather(*(play(environment, "1", str(10 * n), seed=10 * n) for n in range(1, 9)))
    assert [t.reward for t, _ in played] == pytest.approx([1 + 1 - abs(10 * n - 1) / 100 for n in range(1, 9)])


async def test_what_the_server_raises_or_does_not_answer_fails_the_attempt_alone(playing):
    environment = await playing(step_timeout_s=3)
    with pytest.raises(GenerationError, match="step of the OpenEnv server"):
        await play(environment, "raise", seed=60)
    with pytest.raises(DeadlineExceeded, match=r"step of the OpenEnv server(?s:.)*step_timeout_s=3"):
        await play(environment, "hang", seed=60)
    assert (await play(environment, "60", seed=60))[0].reward == 1


async def test_a_server_that_is_not_there_is_refused():
    for settings, found in (({}, "url is not set"), ({"url": "host:80"}, "no address of a server")):
        with pytest.raises(ConfigError, match=found):
            check_environment(recipe_of(**settings))
    environment = build_environment(recipe_of(url="http://127.0.0.1:9"), chat_with())
    with pytest.raises(ConfigError, match=r"rollout\.openenv\.url=http://127\.0\.0\.1:9(?s:.)*Failed to connect"):
        await environment.start()
