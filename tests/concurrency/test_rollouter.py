"""The rollouter between a scripted queue and replicas around scripted engines, with real reward processes."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.data.row_table import RenderedPrompts, RowWriter
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.data.training_set import TrainingSet
from asyncrl.environments.environment import SingleTurn
from asyncrl.errors import LedgerError, Process, ProcessDied
from asyncrl.inference.replica import Replica
from asyncrl.rollout import rollouter as rollouter_module
from asyncrl.rollout.rollouter import Rollouter, RolloutSpec
from asyncrl.rollout.sample_files import RolloutFiles
from asyncrl.rollout.sessions import RolloutSession
from asyncrl.types import (
    Admission,
    Generation,
    PartialGroup,
    PartialTrajectory,
    SamplingParams,
    Segment,
    Ticket,
    Trajectory,
)
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.local import LocalActor, LocalReplicaChannel, Rows, publish
from tests.make import quickstart
from tests.waiting import until

HINT = np.array([4, 3], np.int32)
"""What the environment says between the two turns of `TwoTurns`."""


class TwoTurns:
    """Two responses with a hint of the environment between them."""

    async def run(self, task, session):
        first = await session.generate(task.prompt_ids)
        second = await session.generate(np.concatenate([task.prompt_ids, first.token_ids, HINT]))
        result = await session.reward(session.decode(second.token_ids), task.row)
        n, m = len(first.token_ids), len(first.token_ids) + len(HINT)
        between = Segment(n, m, first.segments[-1].version, first.segments[-1].replica_id, "environment")
        after = [Segment(s.start + m, s.stop + m, s.version, s.replica_id) for s in second.segments]
        written = np.zeros(len(HINT), np.float32)
        return Trajectory(
            prompt_ids=task.prompt_ids,
            response_ids=np.concatenate([first.token_ids, HINT, second.token_ids]),
            logprobs=np.concatenate([first.logprobs, written, second.logprobs]),
            loss_mask=np.array([not n <= i < m for i in range(m + len(second.token_ids))]),
            segments=(*first.segments, between, *after),
            reward=result.reward,
            turns=2,
        )


class Forks(TwoTurns):
    """Two turns, and a branch that asks for the second one again."""

    async def run(self, task, session):
        made = await super().run(task, session)
        asked = np.concatenate([made.prompt_ids, made.response_ids[: made.segments[0].stop], HINT])
        fork = await session.generate(asked)
        mask = np.ones(len(fork.token_ids), np.bool_)
        branch = Trajectory(asked, fork.token_ids, fork.logprobs, mask, fork.segments, 0.0)
        return replace(made, branches=(branch,))


class Hangs(SingleTurn):
    """Prompts with an odd ordinal wait for something that never comes."""

    async def run(self, task, session):
        if task.ordinal % 2:
            await asyncio.Event().wait()
        return await super().run(task, session)


class Thinks(SingleTurn):
    """Works for a while after its response."""

    async def run(self, task, session):
        made = await super().run(task, session)
        await asyncio.sleep(0.2)
        return made


class Queue:
    """Hands out what the test gives; `refuse` names tickets whose put is refused, as those of ended groups are."""

    def __init__(self, *, again=True):
        self.admissions = asyncio.Queue()
        self.put_groups, self.nacks = {}, []
        self.refuse, self.refused = set(), asyncio.Event()
        self.again = again
        self.changed = asyncio.Event()

    def give(self, *tickets, **rest):
        self.admissions.put_nowait(Admission(tuple(tickets), **rest))

    async def admit(self, limit, wait_s, client_id):
        try:
            return await asyncio.wait_for(self.admissions.get(), wait_s)
        except TimeoutError:
            return Admission()

    async def put_many(self, items):
        return [self._put(*item) for item in items]

    def _put(self, ticket, group):
        if ticket in self.refuse:
            self.refused.set()
            return LedgerError("it is not running")
        self.put_groups[ticket] = group.validate()
        self.changed.set()
        return None

    async def nack(self, ticket, reason):
        self.nacks.append((ticket, reason))
        self.changed.set()
        return self.again

    async def ends(self, count):
        async with asyncio.timeout(20):
            while len(self.put_groups) + len(self.nacks) < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    words = {word: n for n, word in enumerate(["[UNK]", "<end>", "a", "b", "c", "five", "six"])}
    words |= {f"{i}": 100 + i for i in range(8)}  # the questions
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken("<end>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="[UNK]")
    fast.chat_template = "{{ messages[0].content }} five six"
    fast.save_pretrained(directory)
    return directory


class Rig:
    """One replica, id `replica_id`, of version `version`; `start` makes a rollouter in front of it."""

    def __init__(self, tmp_path, tokenizer, *overrides, environment="TwoTurns", group_size=2, **script):
        self.path = tmp_path
        self.engine = FakeEngine(FakeScript(start_version=None, chunk_tokens=1, **{"tick_s": 0.0, **script}))
        self.recipe = quickstart(
            f"model.path={tokenizer}",
            f"rollout.environment={__name__}:{environment}",
            f"batch.group_size={group_size}",
            "rollout.sampling.max_response_tokens=20",
            "rollout.poll_interval_s=0.0001",
            "reward.function=exact",
            "reward.workers=1",
            *overrides,
        )
        rows = tuple(PromptRow((ChatMessage("user", f"{i}"),), "1", "test", (), f"train.jsonl:{i}") for i in range(8))
        prompts = tuple(np.array([100 + i, 5, 6], np.int32) for i in range(8))
        self.prompts = RenderedPrompts(rows, prompts, 0)
        writer = RowWriter()
        for row in rows:
            writer.add(row)
        train = TrainingSet(writer.table(), "digest")
        self.spec = RolloutSpec(
            self.recipe,
            train,
            {},
            RolloutFiles(tmp_path / "samples.jsonl", tmp_path / "spans.jsonl", tmp_path / "quarantine.jsonl"),
        )

    @asynccontextmanager
    async def start(self, queue, *, version=0, replica_id=0, publish_id=1):
        replica = Replica(replica_id, lambda: self.engine, gate_timeout_s=5)
        await replica.start()
        await publish(replica, publish_id, version)
        rollouter = Rollouter(self.spec, LocalActor(queue), f"rollouter-{replica_id}")
        await rollouter.start()
        rollouter.rows = Rows()
        await rollouter.set_replicas(rollouter.rows.put(replica_id, LocalReplicaChannel(replica), version=version))
        running = asyncio.create_task(rollouter.run())
        rollouter.replica, rollouter.running = replica, running
        try:
            yield rollouter
            if not running.done():
                await rollouter.stop()
            await asyncio.wait_for(running, 20)
        finally:
            await rollouter.stop()
            await replica.stop()


async def cut_off(rig):
    """A group of two trajectories that is recorded in its second turn; what the rollouter says of it then."""
    queue = Queue()
    queue.give(Ticket(3, 0, 4))
    async with rig.start(queue, version=4) as rollouter:
        await until(lambda: rig.engine.health().generated_tokens >= 2 * 25, "the second turn")
        [partial] = await rollouter.partials()
    return partial


async def ended(rig, *tickets, version=4, replica_id=0, **rest):
    """The queue after these groups have come to their ends."""
    queue = Queue()
    queue.give(*tickets, **rest)
    async with rig.start(queue, version=version, replica_id=replica_id):
        await queue.ends(len(tickets))
    return queue


def resumed(partial, ticket):
    return {"partials": (PartialGroup(ticket, partial.trajectories),)}


async def test_a_group_that_was_cut_off_in_its_second_turn_goes_on_token_by_token(tmp_path, tokenizer):
    partial = await cut_off(Rig(tmp_path, tokenizer, tick_s=0.002))
    assert partial.ticket == Ticket(3, 0, 4)
    for trajectory in partial.trajectories:
        first, second = trajectory.calls
        assert (first.finish_reason, second.finish_reason) == ("length", "abort")
        assert 0 < len(second.token_ids) < 20
    rig, queue = Rig(tmp_path, tokenizer), Queue()
    ticket = Ticket(3, 1, 4)
    queue.give(ticket, **resumed(partial, ticket))
    async with rig.start(queue, version=6, replica_id=1) as rollouter:
        await queue.ends(1)
        await until(lambda: not rollouter._groups, "the end of the group")
        assert await rollouter.partials() == []
    group = queue.put_groups[ticket]
    assert (group.ordinal, group.attempt) == (3, 1)
    for trajectory, before in zip(group.trajectories, partial.trajectories, strict=True):
        trajectory.validate()
        first, second = before.calls
        cut = 20 + len(HINT) + len(second.token_ids)
        known = [*first.token_ids, *HINT, *second.token_ids]
        assert trajectory.response_ids[:cut].tolist() == [int(i) for i in known]
        assert trajectory.logprobs[:20].tolist() == first.logprobs.tolist()
        assert [(s.start, s.stop, s.version, s.replica_id) for s in trajectory.segments] == [
            (0, 20, 4, 0),
            (20, 22, 4, 0),
            (22, cut, 4, 0),
            (cut, 42, 6, 1),
        ]
        assert {int(t) // 10**6 for t in trajectory.response_ids[cut:]} == {6}
    missing = sum(20 - len(t.calls[1].token_ids) for t in partial.trajectories)
    assert rig.engine.health().generated_tokens == missing, "no token is sampled twice"


async def test_a_checkpoint_in_the_middle_of_a_replay_loses_nothing_of_the_record(tmp_path, tokenizer):
    partial = await cut_off(Rig(tmp_path, tokenizer, tick_s=0.002))
    rig, queue = Rig(tmp_path, tokenizer), Queue()
    rig.engine.stall()
    ticket = Ticket(3, 1, 4)
    queue.give(ticket, **resumed(partial, ticket))
    async with rig.start(queue, version=6, replica_id=1) as rollouter:
        await until(lambda: rollouter.client.in_flight == 2, "the continued responses")
        [again] = await rollouter.partials()
        assert again.num_tokens == partial.num_tokens
        assert [len(t.calls) for t in again.trajectories] == [2, 2]
        assert (await rollouter.stats()).groups == 1


async def test_what_was_complete_is_taken_as_it_is(tmp_path, tokenizer):
    [before] = (await ended(Rig(tmp_path, tokenizer), Ticket(3, 0, 4))).put_groups.values()
    partial = PartialGroup(Ticket(3, 0, 4), (PartialTrajectory(done=before.trajectories[0]), PartialTrajectory()))
    rig, ticket = Rig(tmp_path, tokenizer), Ticket(3, 1, 4)
    queue = await ended(rig, ticket, version=6, replica_id=1, **resumed(partial, ticket))
    group = queue.put_groups[ticket]
    assert group.trajectories[0] is before.trajectories[0]
    assert {s.version for s in group.trajectories[1].segments if s.kind == "policy"} == {6}
    assert rig.engine.health().generated_tokens == 40


async def test_a_session_uses_its_record_for_equal_prompts_alone(tmp_path, tokenizer):
    rig, queue = Rig(tmp_path, tokenizer), Queue()

    def call(*prompt, reason="stop"):
        prompt_ids, ids = np.array(prompt, np.int32), np.array([50, 51], np.int32)
        return Generation(prompt_ids, ids, np.zeros(2, np.float32), (Segment(0, 2, 3, 9),), reason)

    async with rig.start(queue, version=4) as rollouter:
        recorded = (call(1, 2), call(1, 2, 3), call(1, 2, 3, 4, reason="abort"))
        tools = replace(rollouter._maker.tools, stop=None)
        session = RolloutSession(tools, SamplingParams(max_tokens=5), "", 0, recorded)
        assert session.calls == recorded
        assert (await session.generate([1, 2])).token_ids.tolist() == [50, 51]
        assert [len(c.token_ids) for c in session.calls] == [2, 2, 2]
        other = await session.generate(np.array([1, 2, 9], np.int32))
        assert [s.version for s in other.segments] == [4]
        prompts = [[1, 2], [1, 2, 9], [1, 2, 3], [1, 2, 3, 4]]
        assert [c.prompt_ids.tolist() for c in session.calls] == prompts
        rest = await session.generate(np.array([1, 2, 3, 4], np.int32))
        assert [s.version for s in rest.segments] == [3, 4], "its first two tokens were recorded"
        assert [c.prompt_ids.tolist() for c in session.calls] == [*prompts[:2], prompts[3], prompts[2]]
        assert rig.engine.health().generated_tokens == 5 + 3


async def test_a_cancelled_group_is_dropped_on_the_replicas_too_and_others_go_on(tmp_path, tokenizer):
    rig, queue = Rig(tmp_path, tokenizer, "rollout.sampling.max_response_tokens=60", tick_s=0.005), Queue()
    given_up, kept = Ticket(0, 0, 4), Ticket(1, 0, 4)
    queue.give(given_up, kept)
    async with rig.start(queue, version=4) as rollouter:
        await until(lambda: rig.engine.health().running == 4, "four responses in flight")
        queue.give(Ticket(2, 0, 4), cancelled=(given_up, Ticket(7, 0, 4)))
        await until(lambda: (0, 0) not in rollouter._groups, "the end of the cancelled group")
        await until(lambda: rig.engine.health().running == 4, "only the two others run")
        stats = await rollouter.stats()
        assert (stats.groups, stats.cancelled_groups) == (2, 1)
        await queue.ends(2)
    assert set(queue.put_groups) == {kept, Ticket(2, 0, 4)}
    assert queue.nacks == []


async def test_a_put_that_comes_too_late_waits_for_the_news_that_its_group_was_cancelled(tmp_path, tokenizer):
    rig, queue = Rig(tmp_path, tokenizer), Queue()
    late = Ticket(0, 0, 4)
    queue.refuse.add(late)
    queue.give(late)
    async with rig.start(queue, version=4) as rollouter:
        await asyncio.wait_for(queue.refused.wait(), 20)
        queue.give(Ticket(1, 0, 4), cancelled=(late,))
        await queue.ends(1)
        await until(lambda: not rollouter._groups, "the end of both groups")
        assert not rollouter.running.done()


async def test_a_put_that_is_refused_for_no_known_reason_ends_the_rollouter(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(rollouter_module, "CANCEL_WAIT_S", 0.05)
    rig, queue = Rig(tmp_path, tokenizer), Queue()
    queue.refuse.add(Ticket(0, 0, 4))
    queue.give(Ticket(0, 0, 4))
    with pytest.raises(LedgerError):
        async with rig.start(queue, version=4) as rollouter:
            await until(rollouter.running.done, "the end of the rollouter")


async def test_a_trajectory_that_takes_too_long_fails_its_group_and_the_last_attempt_is_kept(tmp_path, tokenizer):
    limits = "rollout.trajectory_timeout_s=0.3", "rollout.request_timeout_s=0.3"
    rig = Rig(tmp_path, tokenizer, *limits, environment="Hangs")
    queue = Queue(again=False)
    queue.give(Ticket(1, 2, 4))
    async with rig.start(queue, version=4):
        await queue.ends(1)
        await until((tmp_path / "quarantine.jsonl").exists, "the quarantine")
    [(ticket, reason)] = queue.nacks
    assert ticket == Ticket(1, 2, 4)
    for part in ("DeadlineExceeded", "prompt 1", "Hangs", "0.3 s"):
        assert part in reason
    [line] = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["ordinal"], record["attempt"], record["ground_truth"], record["error"]) == (1, 2, "1", reason)
    assert record["origin"].startswith("train.jsonl:")
    assert record["origin"].endswith(":" + record["prompt"])
    assert record["time_s"] > 0


async def test_a_group_that_will_be_tried_again_is_not_quarantined(tmp_path, tokenizer):
    limits = "rollout.trajectory_timeout_s=0.1", "rollout.request_timeout_s=0.1"
    await ended(Rig(tmp_path, tokenizer, *limits, environment="Hangs"), Ticket(1, 0, 4))
    assert not (tmp_path / "quarantine.jsonl").exists()


async def test_the_death_of_the_queue_ends_the_rollouter_with_its_name(tmp_path, tokenizer):
    rig, queue = Rig(tmp_path, tokenizer), Queue()

    async def dead(limit, wait_s, client_id):
        raise ProcessDied("gone").of(Process("message queue"))

    queue.admit = dead
    with pytest.raises(ProcessDied) as caught:
        async with rig.start(queue, version=4) as rollouter:
            await until(rollouter.running.done, "the end of the rollouter")
    assert str(caught.value.process) == "message queue"


async def test_the_requests_of_every_nth_group_are_recorded_in_time(tmp_path, tokenizer):
    rig, queue = Rig(tmp_path, tokenizer, "observability.trace_every_groups=2"), Queue()
    queue.give(Ticket(1, 0, 4), Ticket(2, 0, 4))
    async with rig.start(queue, version=4):
        await queue.ends(2)
        await until((tmp_path / "spans.jsonl").exists, "the spans")
    [line] = map(json.loads, (tmp_path / "spans.jsonl").read_text().splitlines())
    assert (line["ordinal"], line["attempt"], len(line["trajectories"])) == (2, 0, 2)
    for spans in line["trajectories"]:
        *inner, (kind, began, stopped, _) = spans
        assert kind == "trajectory"
        assert [name for name, *_ in inner] == ["request", "request", "reward"]
        times = [began, *(time for _, a, b, _ in inner for time in (a, b)), stopped]
        assert times == sorted(times)
        assert [made["replica"] for name, _, _, made in inner if name == "request"] == [0, 0]
        assert sum(made["tokens"] for name, _, _, made in inner if name == "request") > 0


async def test_a_replica_without_a_request_waits_for_environments_only_while_one_works(tmp_path, tokenizer):
    rig, queue = Rig(tmp_path, tokenizer, environment="Thinks"), Queue()
    async with rig.start(queue) as rollouter:
        began = time.monotonic()
        queue.give(Ticket(3, 0, 0))
        await queue.ends(1)
        took_s = time.monotonic() - began
        await asyncio.sleep(took_s + 0.5)
        found = (await rollouter.stats()).replica_s
    assert 0.15 < found["environment"] < took_s + 0.25, "more than that if its end is seen later"
