"""Several rollouters as one: parts of the replicas, statistics together, the death of one among others."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.driver.fleet.rollout_fleet import RolloutFleet, together
from asyncrl.driver.rollouters import RolloutSupervisor
from asyncrl.remote.restart_budget import RestartBudget
from asyncrl.types import ReplicaRow, ReplicaTable, RolloutStats
from asyncrl_testing.local import Rows
from tests.concurrency.test_rollouters import Scripted

pytestmark = pytest.mark.concurrency

STATES = st.sampled_from(["serving", "held", "starting", "leased", "dead"])


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


class Fleet:
    """Two rollouters over three replicas."""

    def __init__(self):
        self.made, self.taken, self.forgotten = [], [], []
        self.restarted = asyncio.Event()
        self.rows = Rows({0: "replica 0", 1: "replica 1", 2: "replica 2"})
        supervisors = [
            RolloutSupervisor(
                self.spawn,
                self.take_back,
                self.forget,
                budget=RestartBudget(3, 3600),
                start_timeout_s=5,
                on_event=lambda event: event.kind == "rollouter_restarted" and self.restarted.set(),
                place=(index, 2),
            )
            for index in range(2)
        ]
        self.fleet = RolloutFleet(supervisors)

    def spawn(self, client_id):
        self.made.append(Scripted(client_id, len(self.made)))
        return self.made[-1]

    async def take_back(self, reason, client_id):
        self.taken.append(client_id)
        return 1

    async def forget(self, client_id):
        self.forgotten.append(client_id)

    async def __aenter__(self):
        await self.fleet.set_replicas(self.rows.table)
        await self.fleet.start(5)
        self.running = asyncio.create_task(self.fleet.run())
        return self

    async def __aexit__(self, *_):
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


async def test_each_has_its_part_and_the_death_of_one_is_its_own():
    async with Fleet() as rig:
        first, second = rig.made
        assert (first.known.keys(), second.known.keys()) == ({0, 2}, {1})
        names = rig.fleet.client_ids
        assert names == (first.client_id, second.client_id)
        assert sorted(await rig.fleet.partials(1)) == [0, 1]
        second.die()
        await asyncio.wait_for(rig.restarted.wait(), 20)
        assert rig.taken == [second.client_id], "the groups of the other one go on"
        assert not first.killed
        third = rig.made[2]
        assert third.known.keys() == {1}
        assert rig.fleet.client_ids == (first.client_id, third.client_id)
        await rig.fleet.set_replicas(rig.rows.drop(1))
        assert third.known.keys() == {0, 2}, "it has no replica of its own"
        for _ in range(2):
            await rig.fleet.evaluate("held_out", 0, 5)
        assert [made.calls.count("evaluate") for made in rig.made] == [1, 0, 1], "in turns"
        await rig.fleet.stop(1)
        await asyncio.wait_for(rig.running, 5)


def test_statistics_together():
    one = RolloutStats(10, 1, 2, (0, 2), 100, 5, 1.5, 7, 1, {"generating": 3.0, "evaluation": 1.0}, 0.5)
    other = RolloutStats(20, 3, 4, (1,), 100, 5, 0.5, 1, 0, {"generating": 2.0}, 0.25)
    both = together([one, other])
    assert both == RolloutStats(30, 4, 6, (0, 1, 2), 100, 5, 2.0, 8, 1, {"generating": 5.0, "evaluation": 1.0}, 0.75)
    assert together([one]) == one
