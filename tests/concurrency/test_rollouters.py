"""The owner of rollouters over scripted ones: what dies is replaced, what is no death of it is told."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.driver.fleet.rollouters import POLICY, Rollouters, together
from asyncrl.errors import DeadlineExceeded, GenerationError, ProcessDied, RunFailed
from asyncrl.remote.failure_policy import RestartBudget
from asyncrl.remote.waits import MESSAGE_QUEUE, ROLLOUTER, replica
from asyncrl.types import EvalResult, ReplicaRow, ReplicaTable, RolloutStats
from asyncrl_testing.local import LocalActor, Rows
from tests.waiting import until


def died(process=ROLLOUTER):
    return ProcessDied("it is gone").of(process)


def late():
    return DeadlineExceeded("no answer").of(ROLLOUTER)


STATES = st.sampled_from(["serving", "held", "starting", "leased", "dead"])


class Control:
    """The pool's control of a replica; what calls it goes by its name."""

    def __init__(self, name):
        self.handle = name


class Scripted:
    """A rollouter. `hangs`: stopped, answers nothing until the deadline of a call, also after it was killed;
    `start_error`: raised by its start; `gate`: its start and evaluations wait for it."""

    def __init__(self, client_id, number):
        self.client_id, self.number = client_id, number
        self.known, self.held, self.calls = {}, set(), []
        self.ended_with = asyncio.get_running_loop().create_future()
        self.hangs, self.killed, self.start_error = False, 0, None
        self.gate = asyncio.Event()
        self.gate.set()

    async def _answer(self, call):
        self.calls.append(call)
        if self.hangs and call == "set_replicas":  # its deadline is long
            raise late()
        if self.hangs:
            await asyncio.Event().wait()
        if self.ended_with.done():
            await asyncio.shield(self.ended_with)

    async def start(self):
        await self.gate.wait()
        if self.start_error is not None:
            raise self.start_error
        return self._stats()

    async def run(self):
        await asyncio.shield(self.ended_with)

    async def evaluate(self, name, seed, timeout_s, table):
        self.calls.append("evaluate")
        gate = asyncio.ensure_future(self.gate.wait())
        await asyncio.wait([gate, self.ended_with], return_when=asyncio.FIRST_COMPLETED)
        if self.ended_with.done():
            await asyncio.shield(self.ended_with)
        return EvalResult(name, 0.5, 0.5, 4.0, self.number, 0)

    async def set_replicas(self, table, own):
        await self._answer("set_replicas")
        table = table if own is None else table.only(own)
        self.known = {i: (row.handle.actor.handle, row.version) for i, row in table.those("serving", "held").items()}
        self.held = set(table.those("held"))

    async def partials(self):
        await self._answer("partials")
        return [self.number]

    async def stats(self):
        await self._answer("stats")
        return self._stats()

    async def stop(self):
        await self._answer("stop")
        if not self.ended_with.done():
            self.ended_with.set_result(None)

    def kill(self):
        self.killed += 1
        if not self.hangs:
            self.die()

    def die(self, error=None):
        if not self.ended_with.done():
            self.ended_with.set_exception(error or died())
            self.ended_with.exception()

    async def ended(self):
        assert self.killed

    def _stats(self):
        return RolloutStats(self.number, 0, 0, tuple(self.known), 0.0)


def second_waits(made):
    """A script by which the start and the evaluations of the second one wait."""
    if made.number == 1:
        made.gate.clear()


class Rig:
    """`script`: called with every new rollouter. One replica more than rollouters serves from the beginning."""

    def __init__(self, *, max_restarts=3, script=lambda made: None, kind=Scripted, count=1):
        self.made, self.events, self.taken, self.forgotten = [], [], [], []
        self.take_error = None
        self.script, self.kind = script, kind
        self.rows = Rows({i: Control(f"replica {i}") for i in range(count + 1)})
        self.rollouters = Rollouters(
            self.spawn,
            self.take_back,
            self.forget,
            count=count,
            budget=RestartBudget(max_restarts, 3600),
            start_timeout_s=5,
            on_event=lambda event: self.events.append((event.kind, vars(event))),
        )

    def spawn(self, client_id):
        self.made.append(self.kind(client_id, len(self.made)))
        self.script(self.made[-1])
        return LocalActor(self.made[-1], ROLLOUTER)

    async def take_back(self, reason, client_id):
        assert self.made[-1].killed, "the old one is killed before its groups are issued again"
        if self.take_error is not None:
            raise self.take_error
        self.taken.append(client_id)
        return 5

    async def forget(self, client_id):
        self.forgotten.append(client_id)
        if len(self.forgotten) == 1:
            raise died(replica(1))

    async def __aenter__(self):
        await self.rollouters.set_pool(POLICY, self.rows.table)
        assert (await self.rollouters.start(5)).replicas == tuple(self.rows.table.rows)
        self.running = asyncio.create_task(self.rollouters.run())
        return self

    async def __aexit__(self, *_):
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    async def restarted(self, times=1):
        async with asyncio.timeout(20):
            while Counter(kind for kind, _ in self.events)["rollouter_restarted"] < times:
                if self.running.done():
                    await self.running
                await asyncio.sleep(0.001)


async def test_a_death_is_answered_by_a_new_one_that_knows_the_replicas():
    async with Rig() as rig:
        first = rig.made[0]
        assert rig.rollouters.client_ids == (first.client_id,)
        await rig.rollouters.set_pool(POLICY, rig.rows.put(1, version=7))
        await rig.rollouters.set_pool(POLICY, rig.rows.put(0, state="held"))
        first.die()
        await rig.restarted()
        assert [kind for kind, _ in rig.events] == ["rollouter_failed", "rollouter_restarted"]
        assert "it is gone" in rig.events[0][1]["error"]
        assert rig.events[1][1]["seconds"] >= 0
        second = rig.made[1]
        assert second.known == {0: ("replica 0", None), 1: ("replica 1", 7)}
        assert second.held == {0}
        assert (len(rig.taken), rig.forgotten) == (1, [first.client_id])
        assert rig.rollouters.client_ids == (second.client_id,) != (first.client_id,)
        assert (await rig.rollouters.stats(1)).replicas == (0, 1)
        second.die()
        await rig.restarted(2)
        assert not rig.running.done()


async def test_one_that_answers_no_health_check_is_killed_and_replaced_though_its_death_is_never_told():
    async with Rig() as rig:
        before = await rig.rollouters.stats(1)
        rig.made[0].hangs = True
        assert await rig.rollouters.stats(0.05) == before, "the last ones known"
        await rig.restarted()
        assert rig.made[0].killed
        assert (await rig.rollouters.stats(1)).pid == 1


async def test_an_evaluation_begins_anew_when_its_rollouter_dies():
    async with Rig(script=second_waits) as rig:
        rig.made[0].gate.clear()
        evaluation = asyncio.create_task(rig.rollouters.evaluate("held_out", 0, 5))
        await until(lambda: "evaluate" in rig.made[0].calls)
        rig.made[0].die()
        await until(lambda: len(rig.made) >= 2)
        assert not evaluation.done()
        rig.made[1].gate.set()
        assert (await asyncio.wait_for(evaluation, 20)).num_prompts == 1


async def test_an_evaluation_has_its_deadline_also_while_there_is_no_rollouter():
    async with Rig(script=second_waits) as rig:
        rig.made[0].die()
        with pytest.raises(DeadlineExceeded, match="evaluate"):
            await asyncio.wait_for(rig.rollouters.evaluate("held_out", 0, 0.1), 20)


async def test_during_a_restart_replicas_come_and_go_and_questions_have_an_answer():
    async with Rig(script=second_waits) as rig:
        last = await rig.rollouters.stats(1)
        rig.made[0].die()
        await until(lambda: len(rig.made) >= 2)
        assert await rig.rollouters.partials(1) == []
        assert await rig.rollouters.stats(1) == last
        await rig.rollouters.set_pool(POLICY, rig.rows.drop(0))
        await rig.rollouters.set_pool(POLICY, rig.rows.put(2, Control("replica 2"), version=4))
        rig.made[1].gate.set()
        await rig.restarted()
        assert rig.made[1].known == {1: ("replica 1", None), 2: ("replica 2", 4)}
        assert await rig.rollouters.partials(1) == [1]


async def test_what_changes_while_the_new_one_is_told_is_told_too():
    entered, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Scripted):
        async def set_replicas(self, table, own):
            await super().set_replicas(table, own)
            if self.number == 1 and not go_on.is_set():
                entered.set()
                await go_on.wait()

    async with Rig(kind=Slow) as rig:
        rig.made[0].die()
        await asyncio.wait_for(entered.wait(), 20)
        await rig.rollouters.set_pool(POLICY, rig.rows.drop(0, 1))
        await rig.rollouters.set_pool(POLICY, rig.rows.put(1, Control("another 1"), version=3))
        go_on.set()
        await rig.restarted()
        assert rig.made[1].known == {1: ("another 1", 3)}


async def test_a_table_that_comes_while_the_new_one_is_told_of_another_pool_is_told_too():
    entered, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Scripted):
        async def set_pool(self, key, table):
            if self.number == 1:
                entered.set()
                await go_on.wait()

    async with Rig(kind=Slow) as rig:
        await rig.rollouters.set_pool("judge", rig.rows.table)
        rig.made[0].die()
        await asyncio.wait_for(entered.wait(), 20)
        await rig.rollouters.set_pool(POLICY, rig.rows.drop(0))
        go_on.set()
        await rig.restarted()
        assert rig.made[1].known.keys() == {1}


@pytest.mark.parametrize("how", ["dead", "hangs"])
async def test_a_rollouter_that_is_found_gone_when_it_is_told_something_is_replaced(how):
    async with Rig() as rig:
        if how == "dead":
            rig.made[0].die()
        else:
            rig.made[0].hangs = True
        await rig.rollouters.set_pool(POLICY, rig.rows.put(5, Control("replica 5"), version=1))
        await rig.restarted()
        assert rig.made[1].known.keys() == {0, 1, 5}


async def test_partials_that_come_too_late_are_done_without_and_nobody_is_killed():
    async with Rig() as rig:
        rig.made[0].hangs = True
        assert await rig.rollouters.partials(0.02) == []
        rig.made[0].hangs = False
        assert await rig.rollouters.partials(1) == [0]
        assert (len(rig.made), rig.made[0].killed) == (1, 0)


@pytest.mark.parametrize("error", [died(MESSAGE_QUEUE), GenerationError("its own loop broke")])
async def test_errors_of_others_and_of_its_own_loops_are_raised(error):
    async with Rig() as rig:
        rig.made[0].die(error)
        with pytest.raises(type(error)) as caught:
            await asyncio.wait_for(rig.running, 20)
        assert caught.value is error
        with pytest.raises(type(error)):
            await rig.rollouters.stats(1)
        with pytest.raises(type(error)):
            await rig.rollouters.set_pool(POLICY, rig.rows.put(5, Control("replica 5"), version=1))
        assert (len(rig.made), rig.made[0].killed, rig.events) == (1, 0, [])


async def test_a_queue_that_is_gone_when_groups_are_taken_back_is_told():
    async with Rig() as rig:
        rig.take_error = died(MESSAGE_QUEUE)
        rig.made[0].die()
        with pytest.raises(ProcessDied) as caught:
            await asyncio.wait_for(rig.running, 20)
        assert str(caught.value.process) == "message queue"


async def test_starts_that_fail_count_and_the_spent_budget_names_the_last_error():
    def script(made):
        if made.number:
            made.start_error = late() if made.number == 1 else ProcessDied("out of memory").of(ROLLOUTER)

    async with Rig(max_restarts=2, script=script) as rig:
        rig.made[0].die()
        with pytest.raises(RunFailed, match=r"(?s)out of memory.*recovery\.max_restarts"):
            await asyncio.wait_for(rig.running, 20)
        assert [kind for kind, _ in rig.events] == ["rollouter_failed"] * 3
        assert all(made.killed for made in rig.made)


async def test_without_restarts_the_first_death_ends_the_run():
    async with Rig(max_restarts=0) as rig:
        rig.made[0].die()
        with pytest.raises(RunFailed):
            await asyncio.wait_for(rig.running, 20)
        assert rig.taken == []


async def test_a_stop_ends_the_run_and_leaves_no_process():
    async with Rig() as rig:
        await rig.rollouters.stop(1)
        await asyncio.wait_for(rig.running, 20)
        await rig.rollouters.ended(1)
        assert (len(rig.made), rig.made[0].killed, rig.events) == (1, 1, [])


async def test_a_stop_in_the_middle_of_a_restart_kills_the_new_one():
    async with Rig(script=second_waits) as rig:
        rig.made[0].die()
        await until(lambda: len(rig.made) >= 2)
        await rig.rollouters.stop(1)
        rig.running.cancel()
        await asyncio.gather(rig.running, return_exceptions=True)
        assert rig.made[1].killed


@given(st.lists(STATES, min_size=1, max_size=12), st.integers(1, 5))
def test_every_replica_belongs_to_one_part_and_no_rollouter_is_without(states, count):
    table = ReplicaTable(1, {i: ReplicaRow(None, state, 0) for i, state in enumerate(states)})
    able = table.those("serving", "held").keys()
    parts = [table.part(index, count) for index in range(count)]
    for i in table.rows:
        others = [part for index, part in enumerate(parts) if i in part and index != i % count]
        assert all(part == table.rows.keys() for part in others), "it is another one's, which has some of its own"
    assert all(part & able for part in parts) or not able
    own = parts[0]
    assert table.only(own).rows == {i: row for i, row in table.rows.items() if i in own}


async def test_each_has_its_part_and_the_death_of_one_is_its_own():
    async with Rig(count=2) as rig:
        first, second = rig.made
        assert (first.known.keys(), second.known.keys()) == ({0, 2}, {1})
        names = rig.rollouters.client_ids
        assert names == (first.client_id, second.client_id)
        assert sorted(await rig.rollouters.partials(1)) == [0, 1]
        second.die()
        await rig.restarted()
        assert rig.taken == [second.client_id], "the groups of the other one go on"
        assert not first.killed
        third = rig.made[2]
        assert third.known.keys() == {1}
        assert rig.rollouters.client_ids == (first.client_id, third.client_id)
        await rig.rollouters.set_pool(POLICY, rig.rows.drop(1))
        assert third.known.keys() == {0, 2}, "it has no replica of its own"
        for _ in range(2):
            await rig.rollouters.evaluate("held_out", 0, 5)
        assert [made.calls.count("evaluate") for made in rig.made] == [1, 0, 1], "in turns"
        await rig.rollouters.stop(1)
        await asyncio.wait_for(rig.running, 5)


def test_statistics_together():
    one = RolloutStats(10, 1, 2, (0, 2), 1.5, 7, 1, {"generating": 3.0, "evaluation": 1.0}, 0.5)
    other = RolloutStats(20, 3, 4, (1,), 0.5, 1, 0, {"generating": 2.0}, 0.25)
    both = together([one, other])
    assert both == RolloutStats(30, 4, 6, (0, 1, 2), 2.0, 8, 1, {"generating": 5.0, "evaluation": 1.0}, 0.75)
    assert together([one]) == one
