"""Environments of the released gymnasium, played by a scripted policy in real processes."""

import asyncio
import json

import numpy as np
import pytest

from asyncrl.environments import check_environment
from asyncrl.errors import ConfigError, DataError, DeadlineExceeded, GenerationError, ProcessDied
from asyncrl.types.images import images_in
from tests.contract.test_tool_use import recipe_with, text_of
from tests.environments import ScriptedSession, assert_exact, chat_with, chat_with_images, play, task_of
from tests.waiting import until

pytest.importorskip("gymnasium", reason="the package gymnasium is not installed: pip install 'asyncrl[gymnasium]'")
pytestmark = pytest.mark.timeout(400)

GUESS = {"id": "tests.gymnasium_environments:Guess-v0", "workers": 1, "step_timeout_s": 30}
LAKE = {"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi", "is_slippery": False}, "workers": 1}
ARROWS = ["left", "down", "right", "up"]


def recipe_of(settings, *overrides):
    own = ("rollout.environment=gymnasium", "reward.function=zero", f"rollout.gymnasium={json.dumps(settings)}")
    return recipe_with(*own, *overrides)


async def played(environment, *replies, reward, refused=0, ended=1, task=None):
    """The texts of a prompt and a response whose episode had this reward, and as many refused actions."""
    trajectory, session = await play(environment, *replies, task=task or guessing(60))
    assert_exact(trajectory, session)
    assert session.rewarded == [], "no other reward is asked"
    assert trajectory.reward == pytest.approx(reward)
    assert (trajectory.turns, trajectory.finish_reason) == (len(replies), "stop" if ended else "length")
    assert dict(trajectory.reward_parts) == {"episode_ended": ended, "refused_actions": refused}
    return text_of(session, trajectory.prompt_ids), text_of(session, trajectory.response_ids)


def guessing(number, **extra):
    return task_of([1, 2, 3], "Guess it.", options={"number": number}, **extra)


async def test_an_episode_is_recorded_token_by_token_and_rewarded_by_the_environment(started):
    environment = await started(recipe_of(GUESS))
    prompt, response = await played(environment, "50", "75", "60", reward=0.9 + 0.85 + 1.0)
    assert prompt == "<|im_start|>user\nGuess it.\n\nGuess a number up to 99.<|im_end|>\n<|im_start|>assistant\n"
    assert response == (
        "50<|im_end|>\n<|im_start|>user\ntoo low<|im_end|>\n<|im_start|>assistant\n75<|im_end|>\n<|im_start|>user\n"
        "too high<|im_end|>\n<|im_start|>assistant\n60<|im_end|>"
    )


async def test_the_reward_may_be_that_of_the_last_action(started):
    environment = await started(recipe_of({**GUESS, "reward": "final", "max_turns": 2}))
    await played(environment, "50", "75", reward=0.85, ended=0)


async def test_a_response_without_an_action_is_told_so_and_changes_nothing(started):
    environment = await started(recipe_of({**GUESS, "action_pattern": "<go>(.*?)</go>"}))
    replies = "I think 60", "<go>Sixty!</go>", "<go>5</go> or rather <go>60</go>"
    _, text = await played(environment, *replies, reward=1, refused=2)
    assert "Error: nothing is no action. An action has 1 to 12 characters of ' 0123" in text
    assert "Error: 'Sixty!' is no action." in text


async def test_the_drawing_of_an_environment_is_read_and_its_actions_have_names(started):
    environment = await started(recipe_of({**LAKE, "actions": ARROWS}))
    replies = "Down!", "go DOWN", "not left but right", "right", "fly", "down", "right"
    prompt, text = await played(environment, *replies, reward=1, refused=1)
    assert "\n\n[S]FFF\nFHFH\nFFFH\nHFFG<|im_end|>" in prompt
    assert "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG<|im_end|>" in text
    assert "Error: 'fly' names no action. The actions are left, down, right, up." in text


@pytest.mark.parametrize("draws", [False, True])
async def test_pixels_are_images_for_a_policy_that_reads_them(started, tmp_path, draws):
    chat = chat_with_images(tmp_path)
    settings = {"factory": "tests.gymnasium_environments:make_shown", "kwargs": {"draws": draws}, "workers": 1}
    seeing = f"data.image_directory={tmp_path / 'images'}"
    environment = await started(recipe_of(settings, seeing), chat)
    trajectory, session = await play(environment, "odd", "even", task=task_of([1], "Go.", seed=5), chat=chat)
    assert_exact(trajectory, session)
    assert trajectory.reward == 1
    first, second = (images_in(ids) for ids in (trajectory.prompt_ids, trajectory.response_ids))
    assert [len(found) for found in (first, second)] == [1, 1]
    assert first[0].key != second[0].key
    seen = chat.decode_turn(np.concatenate([trajectory.prompt_ids, trajectory.response_ids]))
    assert [f"step {number}" in seen for number in range(2)] == [draws] * 2
    again, _ = await play(environment, "odd", "even", task=task_of([1], "Go.", seed=5), chat=chat)
    assert np.array_equal(again.response_ids, trajectory.response_ids), "the same pixels are the same tokens"


async def test_a_drawing_leaves_what_else_is_observed(started, tmp_path):
    chat = chat_with_images(tmp_path)
    settings = {"factory": "tests.gymnasium_environments:make_mission", "workers": 1}
    environment = await started(recipe_of(settings, f"data.image_directory={tmp_path / 'images'}"), chat)
    trajectory, _ = await play(environment, "a", task=task_of([1], "Go."), chat=chat, limit=1)
    assert len(images_in(trajectory.prompt_ids)) == 1
    assert "mission: find it\nsteps: 3" in chat.decode_turn(trajectory.prompt_ids)


async def test_without_a_directory_of_images_pixels_are_json(started):
    environment = await started(recipe_of({"factory": "tests.gymnasium_environments:make_shown", "workers": 1}))
    trajectory, session = await play(environment, "a", task=task_of([1], "Go."), limit=1)
    assert "Go.\n\n[[[" in text_of(session, trajectory.prompt_ids)


async def test_actions_without_names_are_numbers_and_other_observations_are_json(started):
    environment = await started(recipe_of({"factory": "tests.gymnasium_environments:make_grid", "workers": 1}))
    replies, task = ("0", "2", "first 1, then 3"), task_of([1], "Go.", seed=5)
    prompt, text = await played(environment, *replies, reward=5, refused=1, task=task)
    assert 'Go.\n\n{"place": [1, 2], "left": 5}<' in prompt
    assert "Error: '0' names no action. The actions are the whole numbers from 1 to 3." in text
    assert '{"place": [2, 0], "left": 0}' in text


async def test_the_seed_is_that_of_the_row_or_the_ordinal_of_the_group(started):
    environment = await started(recipe_of({**GUESS, "max_turns": 1}))

    async def reward(**extra):
        return (await play(environment, "50", task=task_of([1], "Go.", **extra)))[0].reward

    assert await reward() == await reward() == await reward(seed=0), "the ordinal is 0"
    assert len({await reward(seed=seed) for seed in range(6)}) > 1
    with pytest.raises(DataError, match=r"seed of the row at test:1(?s:.)*a whole number"):
        await reward(seed="first")
    with pytest.raises(DataError, match=r"options of the row at test:1(?s:.)*an object"):
        await reward(options=[1])


async def test_many_episodes_share_a_process_and_their_environments_are_used_again(started):
    environment = await started(recipe_of({**GUESS, "workers": 2, "max_turns": 9}))
    replies = [str(number) for number in range(0, 80, 10)]
    episodes = [play(environment, *replies, str(n), task=guessing(n)) for n in range(1, 9)]
    played = await asyncio.gather(*episodes)
    expected = [sum(1 - abs(int(guess) - n) / 100 for guess in replies) + 1 for n in range(1, 9)]
    assert [t.reward for t, _ in played] == pytest.approx(expected)
    pids = set()
    for _ in range(4):
        trajectory, session = await play(environment, "process", "7", task=guessing(7))
        pids.add(text_of(session, trajectory.response_ids).split("user\n")[1].split("<")[0])
    assert len(pids) <= 2


async def test_what_an_environment_raises_fails_its_attempt_alone(started):
    environment = await started(recipe_of(GUESS))
    other = asyncio.create_task(play(environment, "1", "2", "3", "4", "60", task=guessing(60)))
    with pytest.raises(LookupError, match="no such number"):
        await play(environment, "raise", task=guessing(60))
    assert (await other)[0].turns == 5


async def test_an_environment_that_hangs_is_killed_with_its_process_and_the_next_one_plays(started):
    environment = await started(recipe_of({**GUESS, "step_timeout_s": 2}))
    with pytest.raises(DeadlineExceeded, match=r"an action(?s:.)*no result within 2 s"):
        await play(environment, "hang", task=guessing(60))
    assert (await play(environment, "60", task=guessing(60)))[0].reward == 1


async def test_episodes_of_a_process_that_ended_fail_by_name_and_the_next_one_plays(started):
    environment = await started(recipe_of(GUESS))
    gate = asyncio.Event()

    class Waits(ScriptedSession):
        async def generate(self, prompt_ids, max_tokens=None, stop=(), hear=None):
            if self.prompts:
                await gate.wait()
            return await super().generate(prompt_ids, max_tokens)

    session = Waits(chat_with(), "1", "2")
    other = asyncio.create_task(environment.run(guessing(60), session))
    await until(lambda: session.made)
    with pytest.raises(ProcessDied, match="an action"):
        await play(environment, "die", task=guessing(60))
    gate.set()
    with pytest.raises(GenerationError, match="the process that held its environment was ended"):
        await other
    assert (await play(environment, "60", task=guessing(60)))[0].reward == 1


async def test_limits_cut_an_episode_off(started):
    environment = await started(
        recipe_of({**GUESS, "max_observation_tokens": 4}, "rollout.tool_use.max_trajectory_tokens=40")
    )
    trajectory, session = await play(environment, *["1"] * 9, task=guessing(60))
    assert_exact(trajectory, session)
    assert trajectory.finish_reason == "length"
    assert len(trajectory.response_ids) <= 40
    assert "[cut: the first 4 of " in text_of(session, trajectory.prompt_ids)
    trajectory, session = await play(environment, "1" * 30, limit=9, task=guessing(60))
    assert (trajectory.turns, trajectory.finish_reason, trajectory.reward) == (1, "length", 0), "half an action is none"


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, "neither an id nor a factory is set"),
        ({"id": "FrozenLake-v99"}, "making it raised VersionNotFound"),
        ({"id": "NoSuchGame-v0"}, "making it raised NameNotFound"),
        ({"id": "FrozenLake-v1", "kwargs": {"is_sliperry": True}}, "making it raised TypeError"),
        ({"factory": "tests.gymnasium_environments:make_arm"}, "its action space is Box"),
        ({"factory": "tests.gymnasium_environments:make_nothing"}, "it gives a str, no gymnasium.Env"),
        ({"factory": "tests.gymnasium_environments:raises"}, "making it raised OSError: its map is gone"),
        ({"factory": "tests.gymnasium_environments:nothing"}, "cannot import it"),
        ({**LAKE, "actions": ["left", "right"]}, "2 names for its action space Discrete"),
        ({"id": "FrozenLake-v1", "factory": "x:y"}, "they exclude each other"),
        ({**LAKE, "action_pattern": "("}, "no regular expression"),
        ({**LAKE, "action_pattern": "<go>.*</go>"}, "it has 0 groups"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_before_the_run(settings, found):
    with pytest.raises(ConfigError, match=found) as refused:
        check_environment(recipe_of(settings))
    assert "do:" in str(refused.value)


async def test_a_process_that_cannot_be_started_any_more_gets_no_episodes(started):
    environment = await started(recipe_of({**GUESS, "workers": 2}))
    await environment._processes[0].pool.close()
    for _ in range(3):
        assert (await play(environment, "60", task=guessing(60)))[0].reward == 1


async def test_finished_episodes_are_told_again_when_their_request_is_cancelled_while_it_waits(started):
    environment = await started(recipe_of(GUESS))
    process = environment._processes[0]
    process.finished = [77]
    waiting = asyncio.create_task(process.ask("a reset", episode=1, seed=0, options=None))
    await asyncio.sleep(0)
    assert process.finished == []
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert process.finished == [77]
