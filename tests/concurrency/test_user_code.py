"""However the code of a user ends, its group ends exactly once in the ledger, and the rollouter goes on.

A rollouter between a real message queue, a scripted engine and a real reward process.
"""

import asyncio
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asyncrl.environments.environment import SingleTurn
from asyncrl.errors import DeadlineExceeded, GenerationError, ProcessDied
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.rollout import group_maker
from asyncrl.rollout.active_clock import ActiveClock
from asyncrl.rollout.user_code import UserCode
from asyncrl.types import Admission, Ticket
from asyncrl_testing.local import publish
from tests.concurrency.endings import ENDINGS, IGNORES, give_up
from tests.concurrency.test_rollouter import Queue, Rig
from tests.concurrency.test_rollouter import tokenizer as tokenizer
from tests.make import queue_spec
from tests.waiting import until

HELD_OUT = "held_out.jsonl:1"


@dataclass
class Case:
    """`evaluated`: in an evaluation, not in a group.

    `when`: at once, after an await, or when it is cancelled: by the queue's news, by its caller, or by `stop`."""

    ending: str
    place: str
    when: str = "at once"
    evaluated: bool = False
    tries: int = 0
    met: asyncio.Event = field(default_factory=asyncio.Event)
    kept: list = field(default_factory=list)

    @property
    def waits(self):
        return self.when in ("cancelled", "stopped")

    async def end(self):
        if self.when == "after an await":
            await asyncio.sleep(0.001)
        if self.waits:
            self.met.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
        await (ENDINGS | IGNORES)[self.ending]()


async def _within(case, task, session):
    case.kept.append(asyncio.create_task(session.generate(task.prompt_ids)))
    await asyncio.sleep(0)
    await case.end()


async def _after(case, task, session):
    await session.generate(task.prompt_ids)
    await case.end()


async def _group(case, task, session):
    async with asyncio.TaskGroup() as group:
        group.create_task(case.end())
        group.create_task(session.generate(task.prompt_ids))


async def _forgotten(case, task, session):
    case.kept.append(asyncio.create_task(case.end()))


SURE = {
    "before": lambda case, task, session: case.end(),
    "within": _within,
    "after": _after,
    "task": lambda case, task, session: asyncio.create_task(case.end()),
}
"""Places of which an ending leaves the environment."""
PLACES = SURE | {
    "gather": lambda case, task, session: asyncio.gather(case.end(), session.generate(task.prompt_ids)),
    "task group": _group,
    "forgotten task": _forgotten,
    "reward": lambda case, task, session: session.reward(case.ending, task.row),
}


class Ends(SingleTurn):
    """Prompt 0 ends as the case says, in its first attempt only where that waits to be cancelled."""

    case: Case | None = None

    async def run(self, task, session):
        case = Ends.case
        meant = case is not None and task.ordinal == 0 and task.index == 0
        if meant and (task.row.origin == HELD_OUT) == case.evaluated and not (case.waits and case.tries):
            case.tries += 1
            await PLACES[case.place](case, task, session)
        return await super().run(task, session)


class Source:
    """The message queue of the example under way; none before the first one."""

    queue: MessageQueue | None = None

    def __init__(self):
        self.nacks = []

    async def admit(self, limit, wait_s, client_id):
        if self.queue is None:
            await asyncio.sleep(0.001)
            return Admission()
        return await self.queue.admit(limit, min(wait_s, 0.02), client_id)

    async def put_many(self, items):
        return await self.queue.put_many(items)

    async def nack(self, ticket, reason):
        self.nacks.append((ticket, reason))
        return await self.queue.nack(ticket, reason)


class Bench:
    """One rollouter for many examples; an example that stops it makes the next one start another."""

    def __init__(self, path, tokenizer, loop_factory):
        self.path, self.number = path, 0
        self.runner = asyncio.Runner(loop_factory=loop_factory)
        rig = Rig(path, tokenizer, "reward.function=tests.concurrency.endings:reward", "eval.temperature=1")
        rows = tuple(replace(row, origin=HELD_OUT) for row in rig.prompts.rows[:3])
        rig.spec = replace(
            rig.spec,
            recipe=replace(rig.recipe, rollout=replace(rig.recipe.rollout, environment=f"{__name__}:Ends")),
            held_out={"held_out": replace(rig.prompts, rows=rows, prompt_ids=rig.prompts.prompt_ids[:3])},
        )
        self.rig, self.source, self.entered = rig, Source(), None

    def run(self, case, check):
        self.runner.run(self._run(case, check))

    async def _run(self, case, check):
        self.number += 1
        Ends.case, self.source.nacks = None, []
        if self.entered is None:
            self.entered = self.rig.start(self.source)
            self.rollouter, self.publishes = await self.entered.__aenter__(), 1
        await self.publish(0)
        limits = {"groups_per_step": 1, "max_failed_fraction": 1.0, "on_overdue": "refill"}
        spec = replace(queue_spec(self.path, **limits), events_path=self.path / f"events-{self.number}.jsonl")
        Ends.case, self.source.queue = case, MessageQueue(spec)
        async with asyncio.timeout(30):
            await check(self, case)
            counts = await self.source.queue.counts()
        self.source.queue = None
        assert counts.admitted == counts.active + counts.ended, counts
        if self.entered is not None:
            assert not self.rollouter.running.done(), "the rollouter goes on"
            await until(lambda: not self.rollouter._groups, "no group is left")

    async def publish(self, version):
        self.publishes += 1
        await publish(self.rollouter.replica, self.publishes, version)

    async def stop(self):
        entered, self.entered = self.entered, None
        await entered.__aexit__(None, None, None)

    def close(self):
        if self.entered is not None:
            self.runner.run(self.stop())
        self.runner.run(give_up())
        self.runner.close()


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def bench(request, tmp_path_factory, tokenizer):
    made = asyncio.new_event_loop
    if request.param == "uvloop":  # Ray's actors take it where it is installed
        made = pytest.importorskip("uvloop").new_event_loop
    bench = Bench(tmp_path_factory.mktemp("bench"), tokenizer, made)
    yield bench
    bench.close()


def is_ready(queue, ordinal):
    record = queue._ledger.record(ordinal)
    return record is not None and record.state == "ready"


async def ends_in_the_ledger(bench, case):
    queue = bench.source.queue
    if case.when == "cancelled":
        await case.met.wait()
        await until(lambda: is_ready(queue, 1), "the other group")
        await queue.lease(0, 0)
        await queue.commit(0)
        await bench.publish(1)
        await queue.published(1)
        await until(lambda: is_ready(queue, 2), "a newer group")
        await queue.lease(1, 0)  # the first group is overdue, and there is another one
        assert (await queue.counts()).expired == 1
    assert await queue.wait_idle(20)
    assert all("Traceback" in reason for _, reason in bench.source.nacks)
    if case.when == "cancelled":
        assert not bench.source.nacks, "a group that the queue has given up is not answered"
    elif case.place in SURE or case.place == "reward":
        assert [(ticket.ordinal, ticket.attempt) for ticket, _ in bench.source.nacks] == [(0, 0), (0, 1)]
        assert all(case.ending.partition(" ")[0] in reason for _, reason in bench.source.nacks)
        assert (await queue.counts()).failed == 1


async def is_stopped(bench, case):
    queue = bench.source.queue
    await case.met.wait()
    await bench.stop()
    assert not bench.source.nacks
    running = (await queue.counts()).running
    assert await queue.take_back_all("it was stopped", "rollouter-0") == running > 0, "its tickets are still out"


async def is_evaluated(bench, case):
    answering = asyncio.create_task(bench.rollouter.evaluate("held_out", 0, 20))
    if not case.waits:
        failed = (await answering).num_failed
        assert failed == 1 if case.place in SURE or case.place == "reward" else failed <= 1
    else:
        await case.met.wait()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
    assert await bench.source.queue.wait_idle(20)
    assert not bench.source.nacks


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@settings(max_examples=24, **COMMON)
@given(
    ending=st.sampled_from(sorted(ENDINGS)),
    place=st.sampled_from(sorted(PLACES)),
    when=st.sampled_from(["at once", "after an await"]),
    check=st.sampled_from([ends_in_the_ledger, ends_in_the_ledger, is_evaluated]),
)
def test_whatever_leaves_the_code_of_a_user_fails_an_attempt(bench, ending, place, when, check):
    bench.run(Case(ending, place, when, check is is_evaluated), check)


@settings(max_examples=10, **COMMON)
@given(
    ending=st.sampled_from(sorted(ENDINGS | IGNORES)),
    place=st.sampled_from(sorted(PLACES.keys() - {"reward", "forgotten task"})),
    check=st.sampled_from([ends_in_the_ledger, is_evaluated]),
)
@example(ending="swallows and waits", place="task", check=ends_in_the_ledger)
def test_a_cancellation_stays_one_whatever_is_made_of_it(bench, ending, place, check):
    bench.run(Case(ending, place, "cancelled", check is is_evaluated), check)


@settings(max_examples=4, **COMMON)
@given(
    ending=st.sampled_from(sorted(ENDINGS | IGNORES)),
    place=st.sampled_from(sorted(PLACES.keys() - {"reward", "forgotten task"})),
)
@example(ending="swallows and waits", place="before")
@example(ending="swallows and waits", place="task")
@example(ending="SystemExit", place="before")
def test_nothing_hangs_a_stop(bench, ending, place):
    bench.run(Case(ending, place, "stopped"), is_stopped)


class Insists(SingleTurn):
    """Asks until it is told that its time is over, whatever else it is told."""

    told: asyncio.Event

    async def run(self, task, session):
        while True:
            try:
                await session.generate(task.prompt_ids)
                await session.reward("", task.row)
            except GenerationError:
                Insists.told.set()
                raise
            except BaseException:  # noqa: BLE001 - as users write it
                continue


async def test_an_attempt_that_has_ended_gets_no_more_of_the_replicas(tmp_path, tokenizer):
    keys = (
        f"rollout.environment={__name__}:Insists",
        "rollout.trajectory_timeout_s=0.1",
        "rollout.request_timeout_s=0.1",
    )
    rig, queue, Insists.told = Rig(tmp_path, tokenizer, *keys), Queue(), asyncio.Event()
    queue.give(Ticket(1, 0, 0))
    async with rig.start(queue):
        await queue.ends(1)
        assert "DeadlineExceeded" in queue.nacks[0][1]
        await asyncio.wait_for(Insists.told.wait(), 20)


async def test_a_call_is_late_by_a_clock_that_stands_still_in_queues():
    code, clock = UserCode(), ActiveClock(0.3)

    async def waits(seconds):
        clock.wait()
        await asyncio.sleep(seconds)
        clock.sample()
        await asyncio.sleep(0.05)
        clock.end(sampled=True)
        return seconds

    try:
        assert await code.call("it", "the code", lambda: waits(0.8), clock=clock, do="look") == 0.8
        with pytest.raises(DeadlineExceeded, match=r"more than 0\.3 s"):
            await code.call("it", "the code", lambda: asyncio.sleep(20), clock=clock, do="look")
    finally:
        await code.close()


class CancelsAll(SingleTurn):
    """As a shutdown that takes every task of the event loop for its own."""

    async def run(self, task, session):
        for other in asyncio.all_tasks():
            if other.get_name().startswith("group"):
                other.cancel()
        return await super().run(task, session)


async def test_a_group_that_a_stranger_cancels_ends_the_rollouter_which_gives_its_tickets_back(tmp_path, tokenizer):
    rig, queue = Rig(tmp_path, tokenizer, f"rollout.environment={__name__}:CancelsAll"), Queue()
    queue.give(Ticket(0, 0, 0))
    with pytest.raises(ProcessDied, match=r"group 0\.0 was cancelled") as error:
        async with rig.start(queue) as rollouter:
            await until(rollouter.running.done, "the end of the rollouter")
    assert str(error.value.process) == "rollouter", "its supervisor takes the tickets back and starts another"


class Held(SingleTurn):
    async def start(self):
        if Held.bad == "start":
            sys.exit(3)

    async def close(self):
        await (ENDINGS | IGNORES)["swallows and waits" if Held.bad == "close" else "SystemExit"]()


async def test_an_environment_that_exits_in_its_start_is_told_and_one_that_hangs_in_its_close_is_left(
    tmp_path, tokenizer, monkeypatch
):
    monkeypatch.setattr(group_maker, "CLOSE_WAIT_S", 0.05)
    rig = Rig(tmp_path, tokenizer, f"rollout.environment={__name__}:Held")
    Held.bad = "start"
    with pytest.raises(RuntimeError, match="raised SystemExit"):
        async with rig.start(Queue()):
            pass
    for Held.bad in ("close", "exits"):
        async with Rig(tmp_path, tokenizer, f"rollout.environment={__name__}:Held").start(Queue()):
            pass
    await give_up()


LEFT = """
import asyncio
from asyncrl.rollout.active_clock import ActiveClock
from asyncrl.rollout.user_code import UserCode, run_to_its_end
from tests.concurrency.endings import IGNORES

async def starts_another():
    asyncio.create_task(IGNORES["swallows and waits"]())
    await asyncio.create_task(IGNORES["swallows and waits"]())

async def main():
    code = UserCode()
    try:
        await code.call("it", "the code", starts_another, clock=ActiveClock(0.05), do="look")
    except TimeoutError as error:
        print(error)
    await code.close()

run_to_its_end(main())
"""


def test_the_end_of_a_program_does_not_wait_for_what_was_left():
    """`asyncio.run` waits without limit for tasks that ignore their cancellation: asyncrl-eval ends by it."""
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "the code took more than 0.05 s" in done.stdout
