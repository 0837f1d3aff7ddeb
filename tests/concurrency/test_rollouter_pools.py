"""The rollouter with pools of other models: teacher, judge, and rewards that see a whole group."""

import re

import numpy as np
import pytest

from asyncrl.environments.conversation import Conversation
from asyncrl.inference.replica import Replica
from asyncrl.queue.saved_state import load_partials, save_partials
from asyncrl.rewards import RewardResult
from asyncrl.types import Generation, Segment, Ticket
from asyncrl_testing.fake_engine import FakeEngine, FakeScript, fake_experts, fake_scores
from asyncrl_testing.local import LocalReplicaChannel, Rows, publish
from tests.concurrency.test_rollouter import HINT, Queue, Rig, cut_off, ended, resumed, tokenizer
from tests.waiting import until

__all__ = ["tokenizer"]  # a fixture

TEACHER = ("algorithm.distillation.coefficient=1", "algorithm.dynamic_sampling=false")
JUDGE = (
    "rollout.environment=single_turn",
    "reward.judge.weight=2",
    "reward.judge.prompt='{prompt} {response}'",
    "reward.judge.answers={a: 1, b: 0}",
)


def by_length(responses, row):
    return [float(i) for i, _ in enumerate(responses)]


def without_end(responses, row):
    return [1e308 for _ in responses]


def one_too_few(responses, row):
    return [1.0]


async def in_order(first, second, row):
    return 0.5


async def replica(engine):
    made = Replica(7, lambda: engine, gate_timeout_s=5, serves_at_once=True)
    await made.start()
    return made


def rig_with(key, tmp_path, tokenizer, *keys, environment="TwoTurns"):
    overrides = (f"{key}.path={tokenizer}", f"{key}.request_timeout_s=0.5", *keys)
    return Rig(tmp_path, tokenizer, *overrides, environment=environment)


async def served(key, *rig, **options):
    """The queue after one group beside a pool of one replica."""
    queue, beside = Queue(), await replica(FakeEngine(FakeScript()))
    queue.give(Ticket(3, 0, 4))
    async with rig_with(key, *rig, **options).start(queue, version=4) as rollouter:
        await rollouter.set_pool(key, Rows().put(7, LocalReplicaChannel(beside)))
        await queue.ends(1)
    await beside.stop()
    return queue


async def test_the_teacher_scores_every_token_of_a_trajectory(tmp_path, tokenizer):
    [group] = (await served("teacher", tmp_path, tokenizer, *TEACHER)).put_groups.values()
    for trajectory in group.trajectories:
        assert len(trajectory.response_ids) == 42, "also those of the environment"
        assert trajectory.extra["teacher_logprobs"].tolist() == fake_scores(trajectory.response_ids).tolist()
        assert not np.array_equal(trajectory.extra["teacher_logprobs"], trajectory.logprobs)


async def test_the_teacher_scores_every_branch(tmp_path, tokenizer):
    keys = *TEACHER, "rollout.agent.train=all_branches"
    [group] = (await served("teacher", tmp_path, tokenizer, *keys, environment="Forks")).put_groups.values()
    assert group.owners == (0, 1, 0, 1)
    assert [len(s.response_ids) for s in group.sequences] == [42, 42, 20, 20]
    for sequence in group.sequences:
        assert sequence.extra["teacher_logprobs"].tolist() == fake_scores(sequence.response_ids).tolist()


async def test_branches_that_the_recipe_does_not_train_fail_the_attempt(tmp_path, tokenizer):
    rig = Rig(tmp_path, tokenizer, "rollout.agent.train=last_branch", environment="Forks")
    queue = await ended(rig, Ticket(3, 0, 4))
    assert not queue.put_groups
    assert "rollout.agent.train=all_branches" in queue.nacks[0][1]


async def test_the_teachers_likeliest_tokens_come_with_its_scores(tmp_path, tokenizer):
    keys = (*TEACHER, "algorithm.distillation.top_k=3")
    [group] = (await served("teacher", tmp_path, tokenizer, *keys)).put_groups.values()
    for trajectory in group.trajectories:
        assert trajectory.extra["teacher_logprobs"].tolist() == fake_scores(trajectory.response_ids).tolist()
        assert trajectory.extra["top_ids"].tolist() == [[0, 1, 2]] * 42
        assert trajectory.extra["top_logprobs"].tolist() == [fake_scores(np.arange(3)).tolist()] * 42


async def test_a_pool_that_does_not_come_fails_the_attempt_and_a_later_one_serves_the_next(tmp_path, tokenizer):
    rig, queue = rig_with("teacher", tmp_path, tokenizer, *TEACHER), Queue()
    first, second = Ticket(3, 0, 4), Ticket(4, 0, 4)
    queue.give(first)
    teacher = await replica(FakeEngine(FakeScript()))
    async with rig.start(queue, version=4) as rollouter:
        await queue.ends(1)
        [(ticket, reason)] = queue.nacks
        assert ticket == first
        assert "was not finished within 0.5 s" in reason
        rows = Rows()
        lost = LocalReplicaChannel(teacher)
        lost.die()
        await rollouter.set_pool("teacher", rows.put(6, lost))  # it dies under the request, which waits for the next
        queue.give(second)
        await until(lambda: not rollouter._pools["teacher"].loads, "the loss of the dead replica")
        await rollouter.set_pool("teacher", rows.put(7, LocalReplicaChannel(teacher)))
        await until(lambda: second in queue.put_groups, "the second group")
    await teacher.stop()
    assert len(queue.nacks) == 1


async def test_the_judge_is_added_to_the_reward_of_each_response(tmp_path, tokenizer):
    queue = await served("judge", tmp_path, tokenizer, *JUDGE)
    assert not queue.nacks
    [group] = queue.put_groups.values()
    likely = np.exp(fake_scores(np.array([2, 3])))  # the ids of a and b
    for trajectory in group.trajectories:
        parts = dict(trajectory.reward_parts)
        assert parts["judge"] == pytest.approx(likely[0] / likely.sum())
        assert trajectory.reward == pytest.approx(2 * parts["judge"] + parts.get("correct", 0.0))


@pytest.mark.parametrize(("unreadable", "ends"), [("fail", "nack"), ("zero", "put")])
async def test_a_judge_that_cannot_be_read(tmp_path, tokenizer, unreadable, ends):
    keys = ("reward.judge.read=text", "reward.judge.pattern=(yes|no)", f"reward.judge.on_unreadable={unreadable}")
    queue = await served("judge", tmp_path, tokenizer, *JUDGE, *keys)
    if ends == "nack":
        assert "an answer that cannot be read" in queue.nacks[0][1]
        return
    [group] = queue.put_groups.values()
    assert all(dict(t.reward_parts)["judge.unreadable"] == 1 for t in group.trajectories)


@pytest.mark.parametrize("read", ["expected", "text"])
async def test_a_question_over_the_judges_limit_is_worth_the_lowest_answer(tmp_path, tokenizer, read):
    keys = (
        f"reward.judge.read={read}",
        "reward.judge.pattern=(a|b)",
        "reward.judge.answers={a: 1, b: -2}",
        "reward.judge.max_tokens=1",
        f"reward.judge.prompt='{{response}} {'no ' * 300}'",
        "judge.torch.max_model_len=257",
    )
    queue = await served("judge", tmp_path, tokenizer, *JUDGE, *keys)
    [group] = queue.put_groups.values()
    for trajectory in group.trajectories:
        parts = dict(trajectory.reward_parts)
        assert (parts["judge"], parts["judge.unreadable"]) == (-2, 1)


async def test_a_group_reward_is_added_to_each_member(tmp_path, tokenizer):
    keys = (f"reward.group.function={__name__}:by_length", "reward.group.weight=10")
    [group] = (await ended(Rig(tmp_path, tokenizer, *keys, group_size=3), Ticket(3, 0, 4))).put_groups.values()
    assert [t.reward for t in group.trajectories] == [0.0, 10.0, 20.0]
    assert [dict(t.reward_parts)["group"] for t in group.trajectories] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "found"), [("one_too_few", "1 rewards for 2 responses"), ("without_end", "reward is inf")]
)
async def test_a_group_reward_that_is_no_list_of_numbers_fails_the_attempt_and_others_go_on(
    tmp_path, tokenizer, function, found
):
    keys = f"reward.group.function={__name__}:{function}", "reward.group.weight=100"
    queue = await ended(Rig(tmp_path, tokenizer, *keys), Ticket(3, 0, 0), Ticket(4, 0, 0), version=0)
    assert [found in reason for _, reason in queue.nacks] == [True, True]


async def test_pairs_are_compared(tmp_path, tokenizer):
    keys = (f"reward.group.function={__name__}:in_order", "reward.group.pairwise=true")
    [group] = (await ended(Rig(tmp_path, tokenizer, *keys), Ticket(3, 0, 4))).put_groups.values()
    assert [t.reward for t in group.trajectories] == [0.5, 0.5]


# -- recorded experts on their way: over turns, texts of the environment, publishes, and a resume ----------------------


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
