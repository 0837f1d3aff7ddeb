"""Fleets that grow and shrink under load, on a clock of their own: pool, checkpoint engine, replicas and generation
client are real; processes, nodes and the trainer are scripted. Whatever comes, no token is lost or doubled, the fleet
reaches its target, and the audit finds nothing."""

import asyncio
import contextlib
import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl.audit.audit_report import Limits
from asyncrl.audit.driver import Driver
from asyncrl.config.weights import WeightsConfig
from asyncrl.driver.fleet.fleet_size import Changes, FleetLimits, FleetSize, changes
from asyncrl.driver.fleet.replica_pool import PoolSettings, ReplicaPool
from asyncrl.driver.publish.checkpoint_engine import CheckpointEngine
from asyncrl.errors import ConfigError, DeadlineExceeded, NoPlace, ProcessDied
from asyncrl.inference.replica import Replica
from asyncrl.rollout.generation import GenerationClient
from asyncrl.types import ReplicaTable, SamplingParams
from asyncrl.types.events import TrainingResumed, WeightsPublished
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.fake_fleet import GOOD, FakeTrainer
from asyncrl_testing.local import LocalReplicaChannel
from asyncrl_testing.virtual_time import run_virtual
from tests.concurrency.test_generation import PROMPT, check

LEAST, MOST = 2, 6
TOKENS = 30


async def digest_of(manifest, source, timeout_s):
    await asyncio.sleep(0.2)
    return GOOD if manifest.verify else None


class Process:
    """A real replica over a fake engine, reached as over Ray."""

    def __init__(self, replica_id, places):
        self.replica_id, self.places = replica_id, places
        self.engine = FakeEngine(FakeScript(start_version=None, load_hook=digest_of, tick_s=0.05, chunk_tokens=3))
        self.replica = Replica(replica_id, lambda: self.engine, gate_timeout_s=1e6)
        self.channel = LocalReplicaChannel(self.replica, "test")
        self.started = self.killed = False

    async def load(self):
        await asyncio.sleep(1.5)

    async def placed(self, timeout_s):
        await self.places.ready(self.replica_id, timeout_s)

    async def ended(self):
        await asyncio.sleep(0.05)
        assert self.killed

    async def call(self, timeout_s, method, *args):
        await asyncio.sleep(0.01)
        if self.killed:
            raise ProcessDied(f"replica {self.replica_id} was killed")
        found = await method(self.replica, *args)
        self.started = self.started or method is Replica.start
        return found

    def die(self):
        if not self.killed:
            self.killed = True
            self.channel.die()
            self.engine.crash("its process was killed")


class Control:
    """A `ReplicaControl` of a process."""

    def __init__(self, process):
        self.process, self.abandoned = process, False

    async def call(self, timeout_s, method, *args):
        if self.abandoned:
            raise DeadlineExceeded("an earlier control")
        if method is Replica.start:
            await self.process.load()
        return await self.process.call(timeout_s, method, *args)

    async def placed(self, timeout_s):
        await self.process.placed(timeout_s)

    def abandon(self):
        self.abandoned = True
        return Control(self.process)

    def kill(self):
        self.process.die()

    async def ended(self, timeout_s, ping):
        await self.process.ended()


class Nodes:
    """Places: those of the first `LEAST` replicas unless their node is `lost`, and `rooms` others. `draining`: replicas
    whose node was asked to end."""

    def __init__(self, rooms):
        self.rooms, self.held, self.lost, self.draining = rooms, set(), set(), set()
        self.most_held = 0

    def has(self, replica_id):
        if replica_id < LEAST:
            return replica_id not in self.lost | self.draining
        if replica_id not in self.held and len(self.held) < self.rooms:
            self.held.add(replica_id)
        return replica_id in self.held and replica_id not in self.draining

    async def ready(self, replica_id, timeout_s):
        try:
            async with asyncio.timeout(timeout_s):
                while not self.has(replica_id):
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise NoPlace(f"no node had room for replica {replica_id}") from None

    async def give_back(self, replica_id):
        self.held.discard(replica_id)
        self.draining.discard(replica_id)

    async def ending(self):
        return set(self.draining)


class Rig:
    def __init__(self, rooms=MOST, *, max_restarts=1000, most=MOST):
        self.nodes, self.processes, self.log, self.kills = Nodes(rooms), [], [], 0
        self.version = 0
        self.pool = ReplicaPool(
            self._spawn,
            LEAST,
            PoolSettings(
                max_restarts,
                start_timeout_s=4,
                health_interval_s=0.5,
                health_timeout_s=2,
                restart_delay_s=0.1,
                stop_timeout_s=2,
                is_resized=True,
            ),
            on_event=self._write,
        )
        self.fleet = FleetSize(
            self.pool, self.nodes, FleetLimits(LEAST, most), start_timeout_s=4, on_event=self._write, look_s=0.3
        )
        self.client = GenerationClient(
            "test",
            ReplicaTable(),
            request_timeout_s=1e6,
            poll_interval_s=0.05,
            waits_for_replacements=True,
            max_lost=10**6,
        )
        self.weights = CheckpointEngine(
            WeightsConfig(publish_timeout_s=1e5, transfer_timeout_s=1e4),
            FakeTrainer(),
            self.pool,
            interrupt="abort_resume",
            blame_s=0.05,
        )
        self.made = 0

    def _write(self, event):
        self.log.append((event, self.version))

    def _spawn(self, replica_id):
        self.processes.append(Process(replica_id, self.nodes))
        return Control(self.processes[-1])

    async def _route(self, table):
        await asyncio.sleep(0.005)
        rows = {i: replace(row, handle=row.handle.process.channel) for i, row in table.rows.items()}
        self.client.set_replicas(replace(table, rows=rows))

    async def publish(self, *, newcomers_only=False):
        self.version += not newcomers_only
        report = await self.weights.publish(self.version, newcomers_only=newcomers_only)
        if report is not None:
            seconds = dict.fromkeys(("publish_s", "pause_s", "transfer_s"), 0.0)
            counts = {"attempts": report.attempts, "replicas": report.replicas, "verified": report.verified}
            self._write(WeightsPublished(version=self.version, bytes=0, **seconds, **counts))

    async def publishes(self):
        for number in itertools.count():
            await asyncio.sleep(0.4)
            if number % 5 == 4:
                await self.publish()
            elif self.pool.newcomers:
                await self.publish(newcomers_only=True)

    async def requests(self, seed):
        while True:
            found = await self.client.generate(PROMPT, SamplingParams(max_tokens=TOKENS), seed=seed)
            check(found)
            assert len(found.token_ids) == TOKENS
            self.made += 1

    @contextlib.asynccontextmanager
    async def running(self):
        """Under load, with publishes. Raises what any part raises."""
        self.version = 0
        await self.pool.set_listener(self._route)
        await self.pool.start()
        await self.publish(newcomers_only=True)
        works = [self.fleet.watch(), self.pool.watch(), self.publishes(), *(self.requests(i) for i in range(3))]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield self
            for task in tasks:
                if task.done():
                    await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.client.close()
            await self.pool.stop(1)

    async def reached(self):
        """Returns when as many replicas as are wanted serve the newest version."""
        async with asyncio.timeout(300):
            while not (self.fleet.report.is_reached and self._all_serve_the_newest()):
                await asyncio.sleep(0.2)

    def _all_serve_the_newest(self):
        rows = self.pool.table.rows.values()
        return all(row.handle.process.engine.health().version == self.version for row in rows)

    async def more(self, count=20):
        wanted = self.made + count
        async with asyncio.timeout(300):
            while self.made < wanted:
                await asyncio.sleep(0.1)

    @property
    def kinds(self):
        return [event.kind for event, _ in self.log]

    def findings(self):
        """What the audit says of the events."""
        found: list[str] = []
        limits = Limits(1, 2, 10**6, LEAST, "first")
        driver = Driver(limits, found.append)
        driver.start(limits, resumed=False)
        driver.on(TrainingResumed(0, None), 0)
        for event, step in self.log:
            driver.on(event, step)
        return found

    def living(self):
        return [p for p in self.processes if p.started and not p.killed]


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("resize"), st.integers(LEAST, MOST)),
        st.tuples(st.sampled_from(["kill", "terminate", "drain", "lose"]), st.integers(0, MOST)),
        st.tuples(st.just("rooms"), st.integers(0, MOST)),
        st.tuples(st.just("wait"), st.integers(1, 40)),
    ),
    min_size=1,
    max_size=14,
)


async def apply(rig, act, what):
    """Does this now; ids and processes that are not there stand for none."""
    if act == "resize":
        rig.fleet.resize(what)
    elif act == "rooms":
        rig.nodes.rooms = what
    elif act == "wait":
        await asyncio.sleep(what / 10)
    elif act == "drain":
        if what in rig.pool.table.rows:
            rig.nodes.draining.add(what)
    elif act == "lose" and what < LEAST:
        rig.nodes.lost.add(what)
        for process in rig.living():
            if process.replica_id == what:
                rig.kills += 1
                process.die()
    elif what < len(rig.living()):
        process = rig.living()[what]
        if act == "kill":
            rig.kills += 1
            process.die()
        elif act == "terminate":
            process.replica.must_leave = True


@settings(max_examples=75)
@given(ACTS)
@example([("resize", 6), ("wait", 40), ("terminate", 5), ("resize", 2), ("kill", 0), ("wait", 1), ("resize", 6)])
@example([("lose", 0), ("wait", 60), ("lose", 1), ("wait", 60), ("resize", 4)])
def test_whatever_joins_leaves_and_dies_no_token_is_lost_and_the_fleet_reaches_its_target(acts):
    async def scenario():
        rig = Rig(rooms=2)
        async with rig.running():
            for act, what in acts:
                await apply(rig, act, what)
            rig.nodes.rooms = MOST
            rig.nodes.lost.clear()
            rig.nodes.draining.clear()
            await rig.reached()
            await rig.more()
            assert len(rig.nodes.held) == rig.fleet.report.target - LEAST, "what left has given its place back"
            failures = [e.error for e, _ in rig.log if e.kind == "replica_failed"]
            alone = sum("no node had room" in error for error in failures)  # and no other replica was up
            assert len(failures) - alone <= rig.kills, "nothing else counts as a failure"
            assert rig.pool._budget.total <= rig.kills + alone
        assert rig.findings() == []

    run_virtual(scenario())


def test_a_fleet_grows_where_there_is_room_and_shrinks_again():
    async def scenario():
        rig = Rig(rooms=2)
        async with rig.running():
            async with asyncio.timeout(60):
                while len(rig.pool.serving) < LEAST + 2:
                    await asyncio.sleep(0.1)
            await asyncio.sleep(10)
            report = rig.fleet.report
            assert (report.target, sorted(report.states), sorted(report.waiting)) == (MOST, [0, 1, 2, 3], [4, 5])
            assert all("no node had room" in found for found in report.waiting.values()), "each wait had a deadline"
            rig.nodes.rooms = 3
            await asyncio.sleep(10)
            assert len(rig.pool.serving) == 5, "a node that came later is used"
            report = rig.fleet.resize(3)
            assert (report.is_reached, report.waiting) == (False, {})
            assert len(rig.pool.table.those("leaving")) == 2, "at once: nothing may join that is too many"
            await rig.reached()
            await asyncio.sleep(1)
            assert (sorted(rig.pool.serving), rig.nodes.held) == ([0, 1, 2], {2})
            assert [p.replica_id for p in rig.living()] == [0, 1, 2]
        asked = [(e.replicas, e.former, e.asked_by) for e, _ in rig.log if e.kind == "fleet_resized"]
        assert asked == [(MOST, LEAST, "recipe"), (3, MOST, "command")]
        assert {e.why for e, _ in rig.log if e.kind == "replica_left"} == {"scaled"}
        assert rig.findings() == []

    run_virtual(scenario())


def test_a_replica_whose_machine_ends_leaves_in_good_order_and_another_comes_without_a_restart():
    async def scenario():
        rig = Rig(most=None, max_restarts=0)
        async with rig.running():
            rig.living()[0].replica.must_leave = True
            await asyncio.sleep(5)
            await rig.reached()
            rig.nodes.draining.add(1)
            await asyncio.sleep(5)
            assert sorted(rig.pool.serving) == [0], "its node is still there, and is no place any more"
            rig.nodes.draining.clear()
            await rig.reached()
            await rig.more()
        left = [(e.replica, e.why) for e, _ in rig.log if e.kind == "replica_left"]
        assert left == [(0, "preempted"), (1, "preempted")]
        assert rig.findings() == []

    run_virtual(scenario())


async def test_what_the_run_cannot_have_is_refused_with_what_to_do():
    rig = Rig()
    for replicas, found in ((1, "rollout.num_replicas"), (MOST + 1, f"rollout.max_replicas={MOST}")):
        with pytest.raises(ConfigError, match=found) as raised:
            rig.fleet.resize(replicas)
        assert f"asked: {replicas} replicas" in str(raised.value)
        assert "do:    ask for" in str(raised.value)
    await rig.client.close()
    with pytest.raises(ConfigError, match="placement=colocated keeps its 2"):
        FleetLimits(2, None, "placement=colocated").require(3)
    FleetLimits(2, None, "placement=colocated").require(2)
    FleetLimits(2).require(1000)
    assert rig.log == []


async def test_an_error_of_the_places_ends_the_watch():
    rig = Rig()

    async def broken(replica_id, timeout_s):
        raise RuntimeError("Ray refuses")

    rig.nodes.ready = broken
    with pytest.raises(RuntimeError, match="Ray refuses"):
        async with asyncio.timeout(30):
            await rig.fleet.watch()
    await rig.client.close()


@given(
    st.dictionaries(st.integers(0, 9), st.sampled_from(["starting", "serving", "leased", "dead", "leaving"])),
    st.sets(st.integers(0, 12), max_size=4),
    st.integers(0, 4),
    st.integers(0, 6),
)
def test_changes_bring_a_fleet_to_its_target(states, waiting, least, more):
    waiting -= states.keys()
    states = {i: "serving" for i in range(least) if i not in waiting} | states
    target = max(1, least) + more
    found = changes(target, least, states, waiting)
    there = {i for i, state in states.items() if state != "leaving" or i < least}
    after = (there - set(found.leave)) | (waiting - set(found.give_up)) | set(found.begin)
    assert len(after) == target
    assert not set(found.begin) & (states.keys() | waiting), "an id is free only when its replica has left"
    assert all(i >= least for i in (*found.leave, *found.give_up)), "what is reserved stays"
    assert not found.begin or not (found.leave or found.give_up)
    assert not found.leave or not {i for i in waiting if i >= least} - set(found.give_up), "who waits is given up first"


def test_who_does_least_leaves_first():
    states = {0: "serving", 1: "leased", 2: "serving", 3: "starting", 4: "dead", 5: "serving"}
    assert changes(2, 1, states, ()).leave == (4, 3, 5, 2)
    assert changes(5, 1, states, (7,)) == Changes(give_up=(7,), leave=(4,))
    assert changes(8, 1, states, (7,)) == Changes(begin=(6,))


def test_who_has_a_reserved_place_comes_back_to_it_and_others_do_not_wait_for_one_that_leaves():
    assert changes(3, 2, {0: "serving", 1: "leaving", 2: "serving"}, ()) == Changes()
    assert changes(3, 2, {0: "serving", 2: "serving"}, ()) == Changes(begin=(1,))
    assert changes(3, 2, {0: "serving", 1: "serving", 2: "leaving"}, ()) == Changes(begin=(3,))
