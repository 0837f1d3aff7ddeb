"""The pool of replicas over scripted controls: who is a member, who is replaced, when it gives up."""

import asyncio
import copy
from types import SimpleNamespace

import pytest

from asyncrl.driver.fleet.membership import AWAY_AFTER, PoolSettings
from asyncrl.driver.fleet.replica_pool import ReplicaPool
from asyncrl.errors import ConfigError, DeadlineExceeded, NoPlace, ProcessDied, RunFailed
from asyncrl.inference.replica import Replica
from tests.waiting import until


class Control:
    """One process. `runs`: not set while it is stopped, and answers nothing. `renewed`: the controls that followed."""

    def __init__(self, replica_id):
        self.replica_id = replica_id
        self.kills, self.calls = [], []
        self.start_error = self.stats_error = self.reset_error = self.place_error = None
        self.must_leave = False
        self.renewed = []
        self.may_start, self.runs = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.runs.set()

    async def placed(self, timeout_s):
        if self.place_error:
            raise self.place_error

    async def call(self, timeout_s, method, *args):
        """Ends when the process runs; killed, it is dead."""
        if method is Replica.reset:
            timeout_s, _ = args
        waits_for = {"start": self.may_start, "stop": None}.get(method.__name__, self.runs)
        try:
            async with asyncio.timeout(timeout_s):
                if waits_for is not None:
                    await waits_for.wait()
        except TimeoutError:
            raise DeadlineExceeded("no answer in time") from None
        return getattr(self, method.__name__)(*args)

    def start(self):
        if self.start_error:
            raise self.start_error

    def stats(self):
        if self.stats_error:
            raise self.stats_error
        return SimpleNamespace(replica_id=self.replica_id, must_leave=self.must_leave)

    def reset(self, timeout_s, incarnation):
        if self.reset_error:
            raise self.reset_error
        self.calls.append(("reset", incarnation))

    def forget_client(self, client_id):
        self.calls.append(("forget", client_id))

    def stop(self):
        self.calls.append("stop")
        if self.killed:
            raise ProcessDied("it was killed")

    def abandon(self):
        """Another control of the same process: it shares everything but its identity."""
        self.renewed.append(copy.copy(self))
        return self.renewed[-1]

    async def ended(self, timeout_s, ping):
        assert self.killed

    def kill(self):
        self.kills.append(self)

    @property
    def killed(self):
        return len(self.kills)


class Rig:
    """`listen` is the rollout side: it waits for `may_listen`, and computes from each table to which replicas requests
    are sent anew (`announced`), which are lost (`retired`), and which live on without requests (`withdrawn`)."""

    def __init__(self, num=2, max_restarts=2, prepare=lambda c: None, restart_delay_s=0, **settings):
        self.made, self.announced, self.retired, self.withdrawn, self.events = [], [], [], [], []
        self.tables, self.routed = [], {}
        self.may_listen = asyncio.Event()
        self.may_listen.set()
        self.listen_error = None
        self.on_announce = lambda replica_id, control: None

        def spawn(replica_id):
            control = Control(replica_id)
            if len(self.made) >= num:
                prepare(control)
            self.made.append(control)
            return control

        times = {"start_timeout_s": 5, "health_interval_s": 0.01, "health_timeout_s": 1, **settings}
        self.pool = ReplicaPool(
            spawn,
            num,
            PoolSettings(max_restarts, restart_delay_s=restart_delay_s, **times),
            on_event=lambda event: self.events.append((event.kind, vars(event))),
        )

    async def listen(self, table):
        await self.may_listen.wait()
        if self.listen_error:
            raise self.listen_error
        assert not self.tables or table.generation >= self.tables[-1].generation
        self.tables.append(table)
        former, self.routed = self.routed, table.those("serving", "held")
        for i, row in former.items():
            now = table.rows.get(i)
            if now is None or now.incarnation != row.incarnation or i not in self.routed:
                lives = now is not None and now.incarnation == row.incarnation and now.state in ("leased", "leaving")
                (self.withdrawn if lives else self.retired).append(i)
        for i, row in self.routed.items():
            if i not in former or former[i].incarnation != row.incarnation:
                self.announced.append((i, row.handle))
                self.on_announce(i, row.handle)

    async def begin(self):
        """All of them serve; nothing of that is on record."""
        await self.pool.set_listener(self.listen)
        await self.pool.start()
        assert await self.pool.committed(self.pool.members) == len(self.made)
        for record in (self.announced, self.events):
            record.clear()
        return self.pool

    async def fail(self, replica_id, error):
        """The replica that is there now fails, and what follows at once has happened."""
        self.pool.fail(replica_id, self.pool.table.rows[replica_id].handle, error)
        await settled()

    @property
    def kinds(self):
        return [event for event, _ in self.events]


@pytest.fixture
async def begun():
    """Makes rigs whose replicas all serve, and stops their pools."""
    rigs = []

    async def begin(**settings):
        rigs.append(Rig(**settings))
        return rigs[-1], await rigs[-1].begin()

    yield begin
    for rig in rigs:
        await rig.pool.stop(1)


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


async def watched(pool):
    watching = asyncio.create_task(pool.watch())
    await settled()
    assert not watching.done(), "the run goes on"
    return watching


async def test_replicas_are_members_once_they_are_up_and_newcomers_until_they_are_committed():
    rig = Rig()
    await rig.pool.set_listener(rig.listen)
    assert rig.pool.members == {}
    await rig.pool.start()
    assert rig.pool.members == rig.pool.newcomers == dict(enumerate(rig.made))
    assert not rig.pool.serving
    await rig.pool.committed(rig.pool.members)
    assert (rig.pool.newcomers, rig.pool.serving) == ({}, rig.pool.members)
    assert rig.announced == list(enumerate(rig.made)), "requests are sent to a replica from its first weights on"


async def test_a_failed_replica_is_killed_and_replaced_and_announced_after_its_first_commit(begun):
    rig, pool = await begun()
    first = rig.made[0]
    pool.fail(0, first, ProcessDied("gone"))
    assert first.killed == 1
    assert list(pool.members) == [1]
    pool.fail(0, first, ProcessDied("told twice"))
    await settled()
    assert (len(rig.made), pool.newcomers, rig.announced) == (3, {0: rig.made[2]}, [])
    await pool.committed(pool.members)
    assert rig.announced == [(0, rig.made[2])]
    await pool.committed(pool.members)
    assert len(rig.announced) == 1
    assert [e for e, _ in rig.events] == ["replica_failed", "replica_started", "replica_serving"]


async def test_the_watch_replaces_what_answers_no_health_check():
    rig = Rig()
    await rig.pool.start()
    watch = asyncio.create_task(rig.pool.watch())
    rig.made[1].stats_error = DeadlineExceeded("no answer within 1 s")
    await rig.pool.wait_member(1)
    await until(lambda: len(rig.made) == 3 and 1 in rig.pool.members)
    assert rig.made[1].killed == 1
    assert [stats.replica_id for stats in await rig.pool.stats()] == [0, 1]
    watch.cancel()


async def test_when_the_replacements_are_spent_the_watch_and_who_waits_end_with_the_reason():
    rig = Rig(num=1, max_restarts=1)
    await rig.pool.start()
    watch = asyncio.create_task(rig.pool.watch())
    await rig.fail(0, "wrong weights")
    rig.pool.fail(0, rig.made[1], ProcessDied("gone again"))
    with pytest.raises(RunFailed, match=r"(?s)1 replacement.*gone again.*max_replica_restarts"):
        await asyncio.wait_for(watch, 5)
    with pytest.raises(RunFailed):
        await rig.pool.wait_member(5)
    assert len(rig.made) == 2


async def test_replacements_that_cannot_start_spend_the_budget():
    def refuse(control):
        control.start_error = ValueError("no memory")

    rig = Rig(num=1, max_restarts=3, prepare=refuse)
    await rig.pool.start()
    rig.pool.fail(0, rig.made[0], "killed")
    with pytest.raises(RunFailed, match="no memory"):
        await asyncio.wait_for(rig.pool.watch(), 5)
    assert len(rig.made) == 4
    assert all(c.killed == 1 for c in rig.made)


async def test_a_pool_that_stops_replaces_nothing():
    rig = Rig(num=1)
    await rig.pool.start()
    await rig.pool.stop(1)
    rig.pool.fail(0, rig.made[0], ProcessDied("it was asked to stop"))
    assert len(rig.made) == 1


async def test_a_start_survives_what_leaves_a_quorum_and_replaces_the_others():
    rig = Rig(num=4, quorum=3)
    rig.made[2].start_error = RuntimeError("the port is taken")
    await rig.pool.set_listener(rig.listen)
    await rig.pool.start()
    assert rig.made[2].killed
    assert sorted(rig.pool.members) == [0, 1, 3]
    await settled()
    assert sorted(rig.pool.members) == [0, 1, 2, 3]
    assert rig.kinds == ["replica_failed", "replica_started"]


async def test_a_start_without_a_quorum_is_an_error_and_so_is_what_every_replica_would_find():
    rig = Rig(num=4, quorum=3)
    for control in rig.made[:2]:
        control.start_error = ProcessDied("gone")
    with pytest.raises(ProcessDied):
        await rig.pool.start()
    rig = Rig(num=4, quorum=3)
    rig.made[0].start_error = ConfigError("no such model")
    with pytest.raises(ConfigError):
        await rig.pool.start()
    await rig.pool.stop(1)
    assert [c.killed for c in rig.made] == [1] * 4, "nothing was replaced"


async def test_one_that_never_comes_up_stays_away_and_leaves_the_budget_to_the_others():
    def ill(control):
        if control.replica_id == 2:
            control.start_error = RuntimeError("no GPU is left")

    rig = Rig(num=4, quorum=3, prepare=ill, max_restarts=1 + AWAY_AFTER)
    ill(rig.made[2])
    await rig.pool.start()
    await settled()
    assert sorted(rig.pool.members) == [0, 1, 3]
    assert rig.pool.table.rows[2].state == "dead"
    tries = [c for c in rig.made if c.replica_id == 2]
    assert len(tries) == 1 + AWAY_AFTER
    assert all(c.killed for c in tries)
    (await watched(rig.pool)).cancel()


async def test_one_that_no_node_has_room_for_leaves_as_long_as_another_serves():
    """Also one that had served, below the quorum, and without a budget: the others go on. It may come back."""

    def lost(control):
        control.place_error = NoPlace("no node had room for it")

    rig = Rig(num=3, quorum=3, prepare=lost, max_restarts=4, is_resized=True)
    await rig.pool.start()
    await rig.pool.committed(rig.pool.members)
    rig.events.clear()
    for replica_id in (1, 2):
        rig.pool.fail(replica_id, rig.made[replica_id], ProcessDied("its node was lost"))
    await settled()
    assert (sorted(rig.pool.serving), sorted(rig.pool.table.rows)) == ([0], [0])
    assert rig.kinds == ["replica_failed", "replica_failed", "replica_left", "replica_left"]
    assert [fields["why"] for kind, fields in rig.events if kind == "replica_left"] == ["no_place", "no_place"]
    assert len(rig.made) == 5, "each has waited for a place once"
    assert all(control.killed for control in rig.made[1:])
    watching = await watched(rig.pool)
    rig.pool.join(2)
    rig.made[-1].place_error = None
    await settled()
    assert rig.pool.newcomers == {2: rig.made[-1]}, "a node has room again"
    await rig.fail(2, ProcessDied("its node was lost again"))
    await rig.fail(0, ProcessDied("its node was lost too"))
    with pytest.raises(RunFailed, match="no node had room"):
        await watching


async def test_waiting_for_a_member_has_a_deadline():
    rig = Rig(num=1, prepare=lambda c: c.may_start.clear())
    await rig.pool.start()
    rig.pool.fail(0, rig.made[0], "killed")
    with pytest.raises(DeadlineExceeded, match="none was up"):
        await rig.pool.wait_member(0.02)
    waiting = asyncio.create_task(rig.pool.wait_member(5))
    await settled()
    rig.made[1].may_start.set()
    await asyncio.wait_for(waiting, 5)
    await rig.pool.stop(1)


async def test_weights_that_a_dead_incarnation_committed_do_not_make_its_replacement_serve(begun):
    rig, pool = await begun()
    before = pool.members
    await rig.fail(0, "killed after its commit")
    assert await pool.committed(before) == 1
    assert (pool.newcomers, pool.serving, rig.announced) == ({0: rig.made[2]}, {1: rig.made[1]}, [])
    assert "replica_serving" not in rig.kinds
    assert await pool.committed(pool.members) == 2
    assert (pool.newcomers, rig.announced) == ({}, [(0, rig.made[2])])


async def test_requests_go_to_a_failed_replica_no_more_once_the_publish_has_returned(begun):
    rig, pool = await begun()
    rig.may_listen.clear()
    pool.fail(0, rig.made[0], "killed")
    committing = asyncio.create_task(pool.committed({1: rig.made[1]}))
    await settled()
    assert (committing.done(), rig.retired) == (False, [])
    rig.may_listen.set()
    assert await asyncio.wait_for(committing, 5) == 1
    assert rig.retired == [0]


async def test_only_what_requests_were_sent_to_is_retired(begun):
    rig, pool = await begun(max_restarts=2)
    await rig.fail(0, "killed")
    await rig.fail(0, "killed before its first commit")
    assert rig.retired == [0]
    await pool.committed(pool.members)
    await rig.fail(0, "killed when it served, and may not be replaced")
    assert rig.retired == [0, 0]
    assert [i for i, _ in rig.announced] == [0]


async def test_a_failure_to_retire_ends_the_publish(begun):
    rig, pool = await begun()
    rig.listen_error = ProcessDied("the rollouter is gone")
    pool.fail(0, rig.made[0], "killed")
    with pytest.raises(ProcessDied, match="rollouter"):
        await pool.committed({1: rig.made[1]})


async def test_the_watch_sends_the_table_again_and_raises_what_the_rollout_side_raises(begun):
    rig, pool = await begun()
    rig.tables.clear()
    watch = asyncio.create_task(pool.watch())
    await until(lambda: len(rig.tables) >= 3)
    assert len({table.generation for table in rig.tables}) == 1, "nothing had changed"
    rig.listen_error = ProcessDied("the message queue is gone")
    with pytest.raises(ProcessDied, match="message queue"):
        await asyncio.wait_for(watch, 5)


async def test_a_new_listener_gets_the_table_at_once_and_nobody_gets_one_after_it(begun):
    rig, pool = await begun()
    rig.tables.clear()
    await pool.set_listener(rig.listen)
    assert [sorted(table.those("serving")) for table in rig.tables] == [[0, 1]]
    await pool.set_listener(None)
    await rig.fail(0, "killed")
    assert len(rig.tables) == 1


async def test_a_listener_that_answers_late_does_not_count_for_the_next_one():
    rig, following = Rig(prepare=lambda c: c.may_start.clear()), Rig()
    pool = await rig.begin()
    rig.may_listen.clear()
    await rig.fail(0, "killed")
    changing = asyncio.create_task(pool.set_listener(following.listen))
    await settled()
    rig.may_listen.set()
    await asyncio.wait_for(changing, 5)
    assert [sorted(table.those("serving")) for table in following.tables] == [[1]]
    await pool.stop(1)


async def test_after_the_last_failure_nothing_changes_any_more(begun):
    rig, pool = await begun(max_restarts=0)
    pool.fail(0, rig.made[0], "the first reason")
    for _ in range(2):
        pool.fail(0, rig.made[0], "told twice")
        pool.fail(1, rig.made[1], "another one")
    await settled()
    with pytest.raises(RunFailed, match="the first reason"):
        await asyncio.wait_for(pool.watch(), 5)
    assert [c.killed for c in rig.made] == [1, 0]
    assert [(e, f["error"]) for e, f in rig.events] == [("replica_failed", "the first reason")]
    assert (list(pool.members), rig.retired) == ([1], [0])


async def test_a_pool_that_stops_does_not_wait_for_a_late_restart():
    rig = Rig(num=1, restart_delay_s=3600)
    await rig.pool.start()
    await rig.fail(0, "killed before it served")
    assert rig.pool.members == {}
    await asyncio.wait_for(rig.pool.stop(1), 5)
    assert [c.killed for c in rig.made] == [1, 1]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_replica_that_fails_while_it_is_announced_is_retired(begun):
    rig, pool = await begun()
    await rig.fail(0, "killed")
    rig.on_announce = lambda replica_id, control: pool.fail(replica_id, control, "killed in between")
    assert await pool.committed(pool.members) == 1
    await settled()
    assert rig.retired == [0, 0]


# -- late replicas -----------------------------------------------------------------------------------------------------

LATE = DeadlineExceeded("no answer within 1 s")


async def test_a_late_replica_is_set_aside_and_rejoins_as_a_newcomer_that_has_forgotten_everything(begun):
    rig, pool = await begun(rejoin_timeout_s=5)
    late = rig.made[0]
    late.runs.clear()
    await rig.fail(0, LATE)
    assert (list(pool.members), pool.newcomers, rig.retired, late.killed) == ([1], {}, [0], 0)
    pool.fail(0, late, ProcessDied("who still holds the former control is not heard"))
    assert await pool.committed({0: late, 1: rig.made[1]}) == 1, "what it had committed before does not count"
    late.runs.set()
    await until(lambda: len(pool.members) == 2)
    back = pool.members[0]
    assert (late.renewed, late.calls, list(pool.newcomers)) == ([back], [("reset", 1)], [0])
    assert back is not late, "who holds the former control takes it for another incarnation"
    assert rig.announced == []
    await pool.committed(pool.members)
    assert (rig.announced, len(rig.made), late.killed) == ([(0, back)], 2, 0)
    assert rig.kinds == ["replica_suspended", "replica_rejoined", "replica_serving"]


async def test_a_replica_that_stays_late_is_replaced_when_its_time_is_over(begun):
    rig, pool = await begun(rejoin_timeout_s=0.05, health_timeout_s=0.02)
    rig.made[0].runs.clear()
    pool.fail(0, rig.made[0], LATE)
    await until(lambda: len(pool.members) == 2)
    assert (rig.made[0].killed, pool.newcomers) == (1, {0: rig.made[2]})
    assert rig.kinds == ["replica_suspended", "replica_failed", "replica_started"]
    assert "within 0.05 s" in rig.events[1][1]["error"]
    assert rig.retired == [0], "once"


@pytest.mark.parametrize("where", ["stats_error", "reset_error"])
async def test_a_suspended_replica_that_dies_is_replaced_at_once(begun, where):
    rig, pool = await begun(rejoin_timeout_s=3600)
    setattr(rig.made[0], where, ProcessDied("killed while it was stopped"))
    pool.fail(0, rig.made[0], LATE)
    await until(lambda: len(pool.members) == 2)
    assert (rig.made[0].killed, pool.newcomers) == (1, {0: rig.made[2]})


async def test_rejoining_costs_no_replacement_and_being_late_at_the_start_is_a_failure(begun):
    rig, pool = await begun(
        num=1, max_restarts=1, rejoin_timeout_s=5, prepare=lambda c: setattr(c, "start_error", LATE)
    )
    for _ in range(4):
        pool.fail(0, pool.members[0], LATE)
        assert pool.members == {}
        await asyncio.wait_for(pool.wait_member(5), 5)
    assert len(rig.made) == 1
    pool.fail(0, pool.members[0], ProcessDied("gone"))
    with pytest.raises(RunFailed, match="no answer within"):
        await asyncio.wait_for(pool.watch(), 5)
    assert (rig.kinds.count("replica_rejoined"), rig.kinds.count("replica_failed")) == (4, 2)


async def test_a_pool_that_stops_does_not_wait_for_a_suspended_replica(begun):
    rig, pool = await begun(rejoin_timeout_s=3600)
    rig.made[0].runs.clear()
    await rig.fail(0, LATE)
    await asyncio.wait_for(pool.stop(1), 5)
    assert [c.killed for c in rig.made] == [1, 1]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_replacements_count_only_as_long_as_the_window(begun):
    rig, pool = await begun(num=1, max_restarts=1, window_s=0.05)
    await rig.fail(0, ProcessDied("gone"))
    await asyncio.sleep(0.06)
    await rig.fail(0, ProcessDied("gone again, later"))
    assert list(pool.members) == [0]
    pool.fail(0, rig.made[2], ProcessDied("gone again, at once"))
    with pytest.raises(RunFailed, match=r"(?s)2 replacement.*max_replica_restarts"):
        await asyncio.wait_for(pool.watch(), 5)


# -- clients and branches that are gone --------------------------------------------------------------------------------


async def test_a_client_that_is_gone_is_forgotten_by_all_also_by_one_that_was_suspended(begun):
    rig, pool = await begun(num=3, rejoin_timeout_s=5, health_timeout_s=0.05)
    rig.made[0].runs.clear()
    pool.fail(0, rig.made[0], LATE)
    rig.made[1].runs.clear()
    await asyncio.wait_for(pool.forget_client("rollouter-1"), 5)
    assert [c.calls for c in rig.made] == [[], [], [("forget", "rollouter-1")]]
    assert 1 in pool.members, "the health watch finds it"
    rig.made[0].runs.set()
    await until(lambda: len(pool.members) == 3)
    assert rig.made[0].calls == [("reset", 1), ("forget", "rollouter-1")]


async def test_a_fence_makes_newcomers_of_all_and_the_next_publish_announces_them():
    rig = Rig(rejoin_timeout_s=5)
    pool = await rig.begin()
    rig.listen_error = ProcessDied("the former rollouter is gone")
    await rig.fail(1, ProcessDied("gone"))
    rig.made[0].runs.clear()
    fencing = asyncio.create_task(pool.fence())
    await settled()
    assert pool.serving == {}, "at once, whatever the replicas take"
    rig.made[0].runs.set()
    await asyncio.wait_for(fencing, 5)
    assert [c.calls for c in rig.made] == [[("reset", 1)], [], [("reset", 2)]]
    assert pool.newcomers == {0: rig.made[0], 1: rig.made[2]}
    following = Rig()
    await pool.set_listener(following.listen)
    assert await pool.committed(pool.members) == 2
    assert (rig.announced, following.announced) == ([], [(0, rig.made[0]), (1, rig.made[2])])


async def test_a_replica_that_a_fence_finds_late_is_suspended(begun):
    rig, pool = await begun(rejoin_timeout_s=5, health_timeout_s=0.02)
    rig.made[0].runs.clear()
    await asyncio.wait_for(pool.fence(), 5)
    assert (list(pool.newcomers), rig.kinds) == ([1], ["replica_suspended"])


# -- rolling publishes -------------------------------------------------------------------------------------------------


async def test_only_what_serves_is_held_and_the_version_of_a_rolling_publish_is_in_the_table(begun):
    rig, pool = await begun()
    former = rig.made[0]
    pool.fail(0, former, "killed")
    await settled()
    await pool.hold({0: former, 1: rig.made[1]})
    await pool.hold(pool.newcomers)
    assert {i: row.state for i, row in rig.tables[-1].rows.items()} == {0: "newcomer", 1: "held"}
    await pool.committed({0: rig.made[2], 1: rig.made[1]}, 7)
    await pool.committed({0: former}, 8)
    assert {i: (row.state, row.version) for i, row in rig.tables[-1].rows.items()} == dict.fromkeys(
        (0, 1), ("serving", 7)
    )
    sent = len(rig.tables)
    await pool.committed(pool.members)
    assert len(rig.tables) == sent, "a publish to all changes nothing for the rollout side"


async def test_a_leased_replica_is_withdrawn_and_no_member_until_its_lease_ends(begun):
    rig, pool = await begun(num=3)
    leases = await pool.lease(1)
    assert leases == pool.those("leased") == {2: rig.made[2]}
    assert (rig.withdrawn, rig.retired) == ([2], [])
    assert sorted(pool.members) == sorted(pool.serving) == [0, 1]
    assert pool.newcomers == {}, "a catch-up passes it by"
    assert sorted(s.replica_id for s in await pool.stats()) == [0, 1, 2], "its health is watched"
    await pool.end_lease(leases)
    assert rig.made[2].calls == [("reset", 1)]
    assert pool.newcomers == {2: rig.made[2]}
    assert pool.those("leased") == {}
    await pool.committed(pool.members)
    assert rig.announced == [(2, rig.made[2])]
    assert rig.kinds == ["replica_leased", "replica_returned", "replica_serving"]


@pytest.mark.parametrize(("num", "asked", "got"), [(3, 2, [1, 2]), (3, 5, [1, 2]), (2, 1, [1]), (1, 1, [])])
async def test_a_lease_never_takes_the_last_replica(begun, num, asked, got):
    _, pool = await begun(num=num)
    assert sorted(await pool.lease(asked)) == got


async def test_newcomers_are_not_leased(begun):
    rig, pool = await begun(num=3)
    await rig.fail(2, ProcessDied("gone"))
    assert sorted(await pool.lease(2)) == [1]


async def test_a_leased_replica_that_fails_is_replaced_and_the_rollout_side_is_told(begun):
    rig, pool = await begun()
    leases = await pool.lease(1)
    rig.made[1].stats_error = ProcessDied("gone")
    await pool.stats()
    await settled()
    assert (pool.those("leased"), pool.newcomers) == ({}, {1: rig.made[2]})
    assert (rig.withdrawn, rig.tables[-1].rows[1].incarnation) == ([1], 1), "its evaluation sees another incarnation"
    await pool.end_lease(leases)
    assert rig.made[2].calls == [], "its replacement is none of that lease"


async def test_a_leased_replica_that_is_late_is_suspended_and_comes_back_as_a_newcomer(begun):
    rig, pool = await begun(rejoin_timeout_s=5, health_timeout_s=0.05)
    leases = await pool.lease(1)
    rig.made[1].runs.clear()
    await pool.stats()
    await settled()
    assert (pool.those("leased"), sorted(pool.members)) == ({}, [0])
    assert rig.tables[-1].rows[1].state == "suspended"
    await pool.end_lease(leases)
    rig.made[1].runs.set()
    await pool.wait_member(5)
    await until(lambda: pool.newcomers)
    assert len(rig.made) == 2


async def test_one_that_cannot_be_reset_when_its_lease_ends_is_replaced(begun):
    rig, pool = await begun()
    leases = await pool.lease(1)
    rig.made[1].reset_error = RuntimeError("the engine raised")
    await pool.end_lease(leases)
    await settled()
    assert (rig.made[1].killed, pool.newcomers) == (1, {1: rig.made[2]})


# -- joining and leaving -----------------------------------------------------------------------------------------------


async def test_a_replica_that_joins_starts_beside_the_others_and_serves_from_its_first_publish_on(begun):
    rig, pool = await begun(num=1, prepare=lambda c: c.may_start.clear())
    pool.join(5)
    await settled()
    assert pool.table.rows[5].state == "starting"
    assert pool.serving == {0: rig.made[0]}, "nobody waits for it"
    rig.made[1].may_start.set()
    await settled()
    assert pool.newcomers == {5: rig.made[1]}
    await pool.committed(pool.members)
    assert rig.announced == [(5, rig.made[1])]
    assert rig.kinds == ["replica_joined", "replica_started", "replica_serving"]
    with pytest.raises(ValueError, match="replica 5 is there, serving"):
        pool.join(5)


async def test_one_that_leaves_loses_its_requests_first_and_its_process_then(begun):
    rig, pool = await begun(is_resized=True)
    leaving = rig.made[1]
    rig.may_listen.clear()
    pool.leave(1, "scaled")
    await settled()
    assert (pool.members, pool.table.rows[1].state) == ({0: rig.made[0]}, "leaving"), "no publish reaches it any more"
    assert (leaving.calls, leaving.killed) == ([], 0), "the rollout side does not know yet"
    rig.may_listen.set()
    await settled()
    assert rig.withdrawn == [1], "its requests are aborted, and resume elsewhere"
    assert (leaving.calls, leaving.killed, sorted(pool.table.rows)) == (["stop"], 1, [0])
    assert [(kind, fields["why"]) for kind, fields in rig.events] == [("replica_left", "scaled")]
    pool.leave(1, "scaled")  # it is not there
    pool.fail(1, leaving, ProcessDied("told late"))
    assert pool._budget.total == 0


async def test_one_that_dies_while_it_leaves_costs_nothing(begun):
    rig, pool = await begun(max_restarts=0, is_resized=True)
    rig.may_listen.clear()
    pool.leave(1, "preempted")
    pool.fail(1, rig.made[1], ProcessDied("its machine has ended"))
    rig.may_listen.set()
    await settled()
    assert (sorted(pool.table.rows), rig.kinds) == ([0], ["replica_left"])
    assert pool.failure is None


async def test_a_publish_in_progress_ends_before_one_that_leaves_is_stopped(begun, monkeypatch):
    rig, pool = await begun(is_resized=True)
    with pool.publishing():
        reached = pool.members
        pool.leave(1, "scaled")
        await settled()
        assert rig.made[1].killed == 0, "the sender would wait for it"
        assert await pool.committed(reached) == 1, "it serves that version no more"
    await settled()
    assert rig.made[1].killed == 1
    monkeypatch.setattr("asyncrl.driver.fleet.replica_pool.LEAVE_S", 0.02)
    pool.join(1)
    await settled()
    with pool.publishing():
        pool.leave(1, "preempted")
        await until(lambda: rig.made[2].killed)


async def test_one_whose_machine_asked_it_to_end_leaves_and_the_budget_stays_whole(begun):
    rig, pool = await begun(max_restarts=0, is_resized=True)
    rig.made[1].must_leave = True
    await pool.stats()
    await settled()
    assert (sorted(pool.table.rows), rig.made[1].killed) == ([0], 1)
    assert [(kind, fields["why"]) for kind, fields in rig.events] == [("replica_left", "preempted")]
    await pool.stats()
    assert pool.failure is None


async def test_where_nobody_else_brings_it_back_the_pool_replaces_it_at_once(begun):
    rig, pool = await begun(num=1, max_restarts=0, serves_at_once=True)
    rig.made[0].must_leave = True
    await pool.stats()
    await settled()
    await settled()
    assert (pool.serving, rig.made[0].killed) == ({0: rig.made[1]}, 1)
    assert pool.table.rows[0].incarnation == 1


async def test_one_that_leaves_while_it_starts_is_killed_and_what_its_start_says_later_is_ignored(begun):
    rig, pool = await begun(num=1, prepare=lambda c: c.may_start.clear(), is_resized=True)
    pool.join(1)
    await settled()
    pool.leave(1, "scaled")
    await settled()
    assert (rig.made[1].killed, rig.made[1].calls, sorted(pool.table.rows)) == (1, [], [0])
    rig.made[1].may_start.set()
    await settled()
    assert rig.kinds == ["replica_joined", "replica_left"]
    pool.join(1)
    assert pool.table.rows[1].incarnation == 1, "another one than the one that left"


async def test_a_leased_replica_may_leave_and_its_evaluation_sees_it(begun):
    rig, pool = await begun(num=3, is_resized=True)
    leases = await pool.lease(1)
    pool.leave(2, "scaled")
    await settled()
    assert (pool.those("leased"), sorted(pool.table.rows)) == ({}, [0, 1])
    await pool.end_lease(leases)
    assert rig.made[2].calls == ["stop"], "it was not reset"


async def test_a_pool_at_its_end_takes_nobody_in_and_lets_nobody_go(begun):
    rig, pool = await begun(num=1)
    await pool.stop(1)
    pool.join(1)
    pool.leave(0, "scaled")
    await settled()
    assert (len(rig.made), rig.kinds) == (1, [])


async def test_one_that_cannot_be_made_is_no_member(begun):
    _, pool = await begun(is_resized=True)

    def refuse(replica_id):
        raise RuntimeError("Ray has lost its connection")

    pool._spawn = refuse
    with pytest.raises(RuntimeError, match="Ray has lost"):
        pool.join(2)
    assert sorted(pool.table.rows) == [0, 1]
