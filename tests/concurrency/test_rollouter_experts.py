"""Recorded experts on their way: over turns, texts of the environment, publishes, and a resume."""

import re

import numpy as np
import pytest

from asyncrl.environments.conversation import Conversation
from asyncrl.queue.saved_state import load_partials, save_partials
from asyncrl.rewards import RewardResult
from asyncrl.types import Generation, Segment, Ticket
from asyncrl_testing.fake_engine import fake_experts
from asyncrl_testing.local import publish
from tests.concurrency.test_rollouter import HINT, Queue, Rig, cut_off, ended, resumed, tokenizer
from tests.waiting import until

__all__ = ["tokenizer"]  # a fixture

REPLAY = "trainer.router_replay=rollout"


class Talks:
    """Two responses with a hint of the environment between them, and another one at the end."""

    async def run(self, task, session):
        conversation = Conversation(task.prompt_ids)
        for _ in range(2):
            conversation.add_response(await session.generate(conversation.token_ids))
            conversation.add_environment(HINT)
        return conversation.trajectory(await session.reward("five", task.row))


class Shortens:
    """Gives the experts of one token too few."""

    async def run(self, task, session):
        conversation = Conversation(task.prompt_ids)
        conversation.add_response(await session.generate(task.prompt_ids))
        trajectory = conversation.trajectory(await session.reward("five", task.row))
        trajectory.extra["experts"] = trajectory.extra["experts"][:-1]
        return trajectory


def rig(tmp_path, tokenizer, *overrides, environment="Talks", **script):
    keys = (REPLAY, f"rollout.environment={__name__}:{environment}", *overrides)
    return Rig(tmp_path, tokenizer, *keys, **script)


def assert_recorded(trajectory):
    experts = trajectory.validate().extra["experts"]
    for segment in trajectory.segments:
        part = slice(segment.start, segment.stop)
        own = fake_experts(trajectory.response_ids[part])
        expected = own if segment.kind == "policy" else np.full_like(own, -1)
        assert experts[part].tolist() == expected.tolist()


async def test_each_token_keeps_its_experts_over_turns_and_publishes(tmp_path, tokenizer):
    made, queue, ticket = rig(tmp_path, tokenizer, tick_s=0.002), Queue(), Ticket(3, 0, 4)
    queue.give(ticket)
    async with made.start(queue, version=4) as rollouter:
        await until(lambda: made.engine.health().generated_tokens >= 20, "tokens of version 4")
        await publish(rollouter.replica, 2, 5)
        await queue.ends(1)
    for trajectory in queue.put_groups[ticket].trajectories:
        assert {s.version for s in trajectory.segments if s.kind == "policy"} == {4, 5}
        assert len(trajectory.response_ids) == 2 * (20 + len(HINT))
        assert_recorded(trajectory)


async def test_a_group_that_was_cut_off_keeps_the_experts_that_it_had(tmp_path, tokenizer):
    save_partials(tmp_path, [await cut_off(rig(tmp_path, tokenizer, tick_s=0.002))])
    [partial] = load_partials(tmp_path)
    again, ticket = rig(tmp_path, tokenizer), Ticket(3, 1, 4)
    queue = await ended(again, ticket, version=6, replica_id=1, **resumed(partial, ticket))
    for trajectory in queue.put_groups[ticket].trajectories:
        assert {s.version for s in trajectory.segments if s.kind == "policy"} == {4, 6}
        assert_recorded(trajectory)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (f"{Rig.__module__}:TwoTurns", "train with experts.*without them"),
        (f"{__name__}:Shortens", "experts.*and 20 tokens need"),
    ],
)
async def test_a_trajectory_without_the_experts_of_all_its_tokens_fails_its_attempt(
    tmp_path, tokenizer, environment, reason
):
    made = rig(tmp_path, tokenizer, f"rollout.environment={environment}")
    [(_, told)] = (await ended(made, Ticket(3, 0, 4))).nacks
    assert re.search(reason, told, re.DOTALL)


async def test_without_replay_nothing_is_recorded(tmp_path, tokenizer):
    made = rig(tmp_path, tokenizer, "trainer.router_replay=off")
    [group] = (await ended(made, Ticket(3, 0, 4))).put_groups.values()
    assert all(not t.extra for t in group.trajectories)


def test_a_turn_that_was_not_recorded_leaves_the_whole_conversation_without():
    ids = np.array([4, 5], np.int32)

    def made(**extra):
        return Generation(ids, ids, np.zeros(2, np.float32), (Segment(0, 2, 0, 0),), "stop", extra=extra)

    conversation = Conversation(ids)
    conversation.add_response(made(experts=fake_experts(ids)))
    fork = conversation.fork()
    conversation.add_response(made())
    assert conversation.trajectory(RewardResult(0.0)).extra == {}
    fork.add_environment(HINT)
    assert fork.trajectory(RewardResult(0.0)).extra["experts"][2:].max() == -1
    scored = Conversation(ids)
    scored.add_response(made(top_ids=ids[:, None]))
    assert list(scored.trajectory(RewardResult(0.0)).extra) == ["top_ids"]
    scored.add_environment(HINT)
    assert scored.trajectory(RewardResult(0.0)).extra == {}, "every token has some of these, and a text has none"
