"""Held-out sets on replicas that are lent: what they say, what fails over, what ends; and groups beside them."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.environments.environment import SingleTurn
from asyncrl.errors import DeadlineExceeded, GenerationError
from asyncrl.inference.replica import Replica
from asyncrl.rollout import held_out
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.held_out import answer_held_out
from asyncrl.types import SamplingParams, Ticket
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.local import LocalReplicaChannel, Rows, publish
from tests.concurrency.test_generation import PROMPT, Fleet, check, whole
from tests.concurrency.test_rollouter import Queue, Rig
from tests.concurrency.test_rollouter import tokenizer as tokenizer
from tests.make import trajectory
from tests.waiting import until


class Judged(SingleTurn):
    """Right in one response of prompt 0 and in all of prompt 1; prompt 2 raises, prompt 3 has a word for a reward."""

    async def run(self, task, session):
        trajectory = await super().run(task, session)
        if task.ordinal == 2:
            raise ValueError("no such prompt")
        if task.ordinal == 3:
            return replace(trajectory, reward="much", reward_parts=(("correct", 1.0),))
        right = task.ordinal == 1 or (task.ordinal == 0 and task.index == 0)
        return replace(trajectory, reward=2.0 * right - 0.5, reward_parts=(("correct", float(right)),))


@asynccontextmanager
async def evaluating(tmp_path, tokenizer, *overrides, lent=2, prompts=4, **script):
    """A rollouter whose groups go to replica 0 of version 7, and channels of `lent` others, which serve version 3."""
    keys = ["eval.samples=2", "eval.temperature=1", "eval.pass_at=[1,2]", *overrides]
    rig = Rig(tmp_path, tokenizer, f"rollout.environment={__name__}:Judged", *keys, **script)
    held_out = replace(rig.prompts, rows=rig.prompts.rows[:prompts], prompt_ids=rig.prompts.prompt_ids[:prompts])
    rig.spec = replace(rig.spec, held_out={"held_out": held_out})
    engines = [
        FakeEngine(FakeScript(start_version=None, chunk_tokens=1, **{"tick_s": 0.0, **script})) for _ in range(lent)
    ]
    replicas = [Replica(i, lambda e=engine: e, gate_timeout_s=5) for i, engine in enumerate(engines, start=1)]
    for one in replicas:
        await one.start()
        await publish(one, 1, 3)
    queue = Queue()
    async with rig.start(queue, version=7) as rollouter:
        rollouter.channels = {i: LocalReplicaChannel(one) for i, one in enumerate(replicas, start=1)}
        for i, channel in rollouter.channels.items():
            await rollouter.set_replicas(rollouter.rows.put(i, channel, "leased", 3))
        rollouter.engines, rollouter.queue, rollouter.rig = engines, queue, rig
        yield rollouter
    for one in replicas:
        await one.stop()


async def test_lent_replicas_answer_all_of_it_with_their_version(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer) as rollouter:
        result = await rollouter.evaluate("held_out", 0, 20, rollouter.rows.table)
        assert rollouter.rig.engine.health().generated_tokens == 0
    assert (result.versions, result.num_prompts, result.samples, result.num_failed) == ((3,), 4, 2, 4)
    assert result.pass_rates == (0.5, 1.0, 0.0, 0.0)
    assert (result.accuracy, result.pass_at) == (3 / 8, ((1, 3 / 8), (2, 0.5)))
    assert result.reward_mean == pytest.approx((3 * 1.5 - 0.5) / 4)


async def test_without_a_lease_the_replicas_that_serve_answer(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer) as rollouter:
        result = await rollouter.evaluate("held_out", 0, 20)
        assert not any(engine.health().generated_tokens for engine in rollouter.engines)
    assert result.versions == (7,)


async def test_groups_never_go_to_a_lent_replica(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer, tick_s=0.002) as rollouter:
        evaluation = asyncio.create_task(rollouter.evaluate("held_out", 0, 20, rollouter.rows.table))
        rollouter.queue.give(*(Ticket(i, 0, 7) for i in (0, 1, 3, 4)))
        await rollouter.queue.ends(4)
        assert (await evaluation).versions == (3,)
        groups = rollouter.queue.put_groups.values()
        assert {s.replica_id for g in groups for t in g.trajectories for s in t.segments} == {0}


async def test_a_lent_replica_that_dies_leaves_its_requests_to_the_others(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer, tick_s=0.002) as rollouter:
        evaluation = asyncio.create_task(rollouter.evaluate("held_out", 0, 20, rollouter.rows.table))
        await until(lambda: all(e.health().generated_tokens > 8 for e in rollouter.engines), "both at work")
        rollouter.channels[1].die()
        result = await evaluation
    assert (result.num_failed, result.versions) == (4, (3,))


@pytest.mark.parametrize("how", ["dies", "is taken out"])
async def test_when_the_last_one_is_lost_there_is_no_result(tmp_path, tokenizer, how):
    async with evaluating(tmp_path, tokenizer, lent=1, tick_s=0.002) as rollouter:
        evaluation = asyncio.create_task(rollouter.evaluate("held_out", 0, 20, rollouter.rows.table))
        await until(lambda: rollouter.engines[0].health().generated_tokens > 8, "at work")
        if how == "dies":
            rollouter.channels[1].die()
        else:
            await rollouter.set_replicas(rollouter.rows.drop(1))
        with pytest.raises(GenerationError, match="last"):
            await asyncio.wait_for(evaluation, 20)
        rollouter.queue.give(Ticket(1, 0, 7))
        await rollouter.queue.ends(1)


async def test_an_evaluation_ends_at_its_deadline_and_leaves_nothing_on_the_replicas(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer, tick_s=0.02) as rollouter:
        with pytest.raises(DeadlineExceeded, match=r"(?s)held_out within 0.2 s.*eval.timeout_s"):
            await rollouter.evaluate("held_out", 0, 0.2, rollouter.rows.table)
        await until(lambda: not any(e.health().running for e in rollouter.engines), "the replicas are idle")


async def test_an_evaluation_of_which_nothing_came_is_no_result(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer) as rollouter:
        rollouter._maker.trajectory = _raises
        with pytest.raises(GenerationError, match=r"all 4 prompts failed.*no such"):
            await rollouter.evaluate("held_out", 0, 20, rollouter.rows.table)


async def test_at_the_deadline_the_answers_so_far_are_a_result_that_says_so(tmp_path, tokenizer, monkeypatch, caplog):
    prompts, done = Rig(tmp_path, tokenizer).prompts, asyncio.Event()
    count = len(prompts.rows)
    monkeypatch.setattr(held_out, "TELL_S", 0.01)

    async def attempt(index, number):
        if index == count - 1 and number:
            await done.wait()
        return trajectory(reward=float(index == 0))

    settings = {"samples": 2, "pass_at": [1], "timeout_s": 0.3}
    with caplog.at_level("INFO"):
        result = await answer_held_out("set", prompts, attempt, takes_part=True, **settings)
    assert (result.num_prompts, result.num_asked) == (count - 1, count)
    assert result.accuracy == pytest.approx(1 / (count - 1))
    assert f"{2 * count - 1} of {2 * count} responses, accuracy so far" in caplog.text
    with pytest.raises(DeadlineExceeded):
        await answer_held_out("set", prompts, attempt, **settings)
    done.set()
    assert (await answer_held_out("set", prompts, attempt, takes_part=True, **settings)).num_asked == 0


async def test_first_responses_are_shown_on_request(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer) as rollouter:
        result = await rollouter.evaluate("held_out", 0, 20, rollouter.rows.table, show=2)
        assert not (await rollouter.evaluate("held_out", 0, 20, show=0)).shown
    assert [prompt for prompt, _, _ in result.shown] == [r.messages[-1].content for r in rollouter.rig.prompts.rows[:2]]


async def _raises(task, session):
    raise ValueError("no such prompt")


async def test_a_withdrawn_replica_stops_working_and_no_token_that_came_is_lost():
    async with Fleet(tick_s=0.001, waits=True) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=60))) for _ in range(8)]
        await fleet.sampled(40)
        before = fleet.replicas[0]._engine.health().generated_tokens
        fleet.client.set_replicas(fleet.rows.put(0, state="leased"))
        fleet.client.set_replicas(fleet.rows.table)
        assert sorted(fleet.client.loads) == [1]
        other = GenerationClient(
            "other",
            Rows({0: LocalReplicaChannel(fleet.replicas[0], "other")}).table,
            request_timeout_s=20,
            poll_interval_s=0.001,
        )
        check(await other.generate(PROMPT, SamplingParams(max_tokens=5)))
        generations = await whole(running, 60)
        assert {s.replica_id for g in generations for s in g.segments} == {0, 1}, "what it had sampled is kept"
        assert fleet.engines[0].health().generated_tokens < before + 60, "its requests were aborted"
        fleet.client.set_replicas(fleet.rows.put(0, fleet.channels[0], version=0))
        again = await asyncio.gather(*(fleet.client.generate(PROMPT, SamplingParams(max_tokens=5)) for _ in range(4)))
        assert {s.replica_id for g in again for s in g.segments} == {0, 1}
        await other.close()


@pytest.mark.parametrize("how", ["leased", "leaving", "another client's"])
async def test_a_withdrawn_replica_hands_over_the_tokens_that_its_outbox_gathers(how):
    """The last: when the replicas of one of several rollouters are back, and it had worked with those of the others."""
    async with Fleet(tick_s=0.002, chunk_tokens=1, waits=True, poll_interval_s=0.05) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=200))) for _ in range(8)]
        await fleet.sampled(80)
        assert not any(p.draft.num_tokens for p in fleet.client._pending.values()), "all are still at the replicas"
        if how == "another client's":
            fleet.client.set_replicas(fleet.rows.table.only({1}), fleet.rows.table)
        else:
            fleet.client.set_replicas(fleet.rows.put(0, state=how))
        late = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=5)))
        await fleet.client.handed_over()
        assert not fleet.engines[0].health().running, "they were aborted"
        sampled = fleet.engines[0].health().generated_tokens
        generations = [*await whole(running, 200), *await whole([late], 5)]
        kept = sum(s.stop - s.start for g in generations for s in g.segments if s.replica_id == 0)
        assert kept == sampled == fleet.engines[0].health().generated_tokens > 20
        assert sorted(fleet.client.loads) == [1]


async def test_the_rollouter_answers_when_a_leased_replica_has_handed_over(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer, "rollout.poll_interval_s=0.05", tick_s=0.002) as rollouter:
        rollouter.queue.give(Ticket(1, 0, 7))
        await until(lambda: rollouter.rig.engine.health().generated_tokens > 20, "at work")
        await rollouter.set_replicas(rollouter.rows.put(0, state="leased"))
        assert not rollouter.rig.engine.health().running
        assert not rollouter.client.in_flight or all(p.link.lost for p in rollouter.client._pending.values())
        await rollouter.set_replicas(rollouter.rows.put(0, state="serving"))
        await rollouter.queue.ends(1)


async def test_requests_that_a_withdrawn_replica_never_got_go_elsewhere():
    async with Fleet(waits=True, poll_interval_s=0.05) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=5))) for _ in range(8)]
        while not fleet.client.in_flight:
            await asyncio.sleep(0)
        fleet.client.set_replicas(fleet.rows.put(0, state="leased"))
        await asyncio.wait_for(fleet.client.handed_over(), 1.5)
        generations = await asyncio.gather(*running)
        assert {s.replica_id for g in generations for s in g.segments} == {1}


async def test_a_withdrawn_replica_that_does_not_answer_is_waited_for_only_so_long(monkeypatch):
    monkeypatch.setattr("asyncrl.rollout.replica_link.HAND_OVER_S", 0.1)
    async with Fleet(tick_s=0.002, waits=True) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=60))) for _ in range(8)]
        await fleet.sampled(40)
        fleet.channels[0].abort = lambda request_ids: asyncio.Event().wait()
        fleet.client.set_replicas(fleet.rows.put(0, state="leased"))
        await asyncio.wait_for(fleet.client.handed_over(), 5)
        await whole(running, 60)


async def test_forgetting_a_client_forgets_its_evaluations():
    engine = FakeEngine(FakeScript(start_version=None, tick_s=0.001))
    served = Replica(0, lambda: engine, gate_timeout_s=5)
    await served.start()
    await publish(served, 1, 0)
    channel = LocalReplicaChannel(served, "rollouter-1/evaluation-0")
    client = GenerationClient("c", Rows({0: channel}).table, request_timeout_s=20, poll_interval_s=0.001)
    running = asyncio.create_task(client.generate(np.array([1], np.int32), SamplingParams(max_tokens=4000)))
    await until(lambda: engine.health().generated_tokens, "at work")
    await served.forget_client("rollouter-1")
    await until(lambda: not engine.health().running, "idle")
    with pytest.raises(GenerationError, match="counts as dead"):
        await served.collect("rollouter-1/evaluation-1", 0.1)
    await served.collect("rollouter-10/evaluation-0", 0.01)
    running.cancel()
    await client.close()
    await served.stop()
