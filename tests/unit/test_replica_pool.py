"""The pool of replicas over scripted controls: who is a member, who is replaced, when it gives up."""

import asyncio

import pytest

from asyncrl.errors import DeadlineExceeded, ProcessDied, RunFailed
from asyncrl.inference.pool import PoolSettings, ReplicaPool

pytestmark = pytest.mark.unit


class Control:
    def __init__(self, replica_id):
        self.replica_id = replica_id
        self.killed = 0
        self.start_error = None
        self.stats_error = None
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def start(self, timeout_s):
        await asyncio.wait_for(self.may_start.wait(), timeout_s)
        if self.start_error:
            raise self.start_error

    async def stats(self, timeout_s):
        if self.stats_error:
            raise self.stats_error
        return self.replica_id

    async def stop(self, timeout_s):
        if self.killed:
            raise ProcessDied("it was killed")

    def kill(self):
        self.killed += 1


class Rig:
    def __init__(self, num=2, max_restarts=2, prepare=lambda c: None):
        self.made, self.announced, self.retired, self.events = [], [], [], []

        def spawn(replica_id):
            control = Control(replica_id)
            if len(self.made) >= num:
                prepare(control)
            self.made.append(control)
            return control

        async def announce(replica_id, control):
            self.announced.append((replica_id, control))

        async def retire(replica_id):
            self.retired.append(replica_id)

        self.pool = ReplicaPool(
            spawn,
            num,
            PoolSettings(
                max_restarts, start_timeout_s=5, health_interval_s=0.01, health_timeout_s=1, restart_delay_s=0
            ),
            announce=announce,
            retire=retire,
            on_event=lambda event, **fields: self.events.append((event, fields)),
        )


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_replicas_are_members_once_they_are_up_and_newcomers_until_they_are_committed():
    rig = Rig()
    assert rig.pool.members == {}
    await rig.pool.start()
    assert rig.pool.members == rig.pool.newcomers == dict(enumerate(rig.made))
    assert not rig.pool.serving
    await rig.pool.committed(rig.pool.members)
    assert (rig.pool.newcomers, rig.pool.serving, rig.announced) == ({}, True, [])


async def test_a_failed_replica_is_killed_and_replaced_and_announced_after_its_first_commit():
    rig = Rig()
    await rig.pool.start()
    await rig.pool.committed(rig.pool.members)
    first = rig.made[0]
    rig.pool.fail(0, first, ProcessDied("gone"))
    assert first.killed == 1
    assert list(rig.pool.members) == [1]
    rig.pool.fail(0, first, ProcessDied("told twice"))
    await settled()
    assert (len(rig.made), rig.pool.newcomers, rig.announced) == (3, {0: rig.made[2]}, [])
    await rig.pool.committed(rig.pool.members)
    assert rig.announced == [(0, rig.made[2])]
    await rig.pool.committed(rig.pool.members)
    assert len(rig.announced) == 1
    assert [e for e, _ in rig.events] == ["replica_failed", "replica_started", "replica_serving"]


async def test_the_watch_replaces_what_answers_no_health_check():
    rig = Rig()
    await rig.pool.start()
    watch = asyncio.create_task(rig.pool.watch())
    rig.made[1].stats_error = DeadlineExceeded("no answer within 1 s")
    await rig.pool.wait_member(1)
    async with asyncio.timeout(5):
        while len(rig.made) < 3 or 1 not in rig.pool.members:
            await asyncio.sleep(0.005)
    assert rig.made[1].killed == 1
    assert sorted(await rig.pool.stats()) == [0, 1]
    watch.cancel()


async def test_when_the_replacements_are_spent_the_watch_and_who_waits_end_with_the_reason():
    rig = Rig(num=1, max_restarts=1)
    await rig.pool.start()
    watch = asyncio.create_task(rig.pool.watch())
    rig.pool.fail(0, rig.made[0], "wrong weights")
    await settled()
    rig.pool.fail(0, rig.made[1], ProcessDied("gone again"))
    with pytest.raises(RunFailed, match=r"(?s)1 replacement.*gone again.*max_restarts"):
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


async def test_an_error_at_the_first_start_is_raised():
    rig = Rig()
    rig.made[1].start_error = ValueError("the model cannot be read")
    with pytest.raises(ValueError, match="cannot be read"):
        await rig.pool.start()
    await rig.pool.stop(1)
    assert [c.killed for c in rig.made] == [1, 1]


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
