"""Every second of the trainer and of the replicas belongs to exactly one cause."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.driver.step_record import ReplicaShares, TimeAccount
from asyncrl.rollout.replica_time import ReplicaTime, ReplicaUse
from asyncrl.types import RolloutStats


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_blocks_are_booked_to_the_innermost_cause():
    clock = Clock()
    account = TimeAccount("other", clock)
    clock.now += 1
    with account.during("groups"):
        clock.now += 2
        with account.during("publish"):
            clock.now += 4
        clock.now += 8
        with suppress(KeyError), account.during("publish"):
            clock.now += 16
            raise KeyError
    clock.now += 32
    account.move(5.0, "groups", "overdue")
    account.move(1000.0, "publish", "recovering")
    assert account.take() == {"other": 33, "groups": 5, "overdue": 5, "publish": 0, "recovering": 20}
    assert account.take() == {"other": 0}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 10), st.booleans())))
def test_the_causes_add_up_to_the_time(blocks):
    clock = Clock()
    account, began = TimeAccount("a", clock), clock.now
    taken = 0.0
    for cause, seconds, takes in blocks:
        with account.during(cause):
            clock.now += seconds
            if takes:
                taken += sum(account.take().values())
        account.move(seconds, "b", "c")
    assert taken + sum(account.take().values()) == pytest.approx(clock.now - began)


COUNTS = st.integers(0, 5)
USES = st.builds(
    lambda serving, idle, held, quiet, leased, asleep, absent, working: ReplicaUse(
        serving + idle, serving, held + quiet, held, leased, asleep, absent, working
    ),
    *[COUNTS] * 8,
)


@given(st.lists(st.tuples(st.floats(0, 10), USES)))
def test_replica_seconds_add_up(moments):
    now, expected = 0.0, 0.0
    time = ReplicaTime(now)
    seconds, replicas = {}, 0
    for passed, use in moments:
        now += passed
        expected += passed * replicas
        seconds = time.observe(now, use)
        replicas = use.serving + use.held + use.leased + use.asleep + use.absent
    assert sum(seconds.values()) == pytest.approx(expected)


def test_what_replicas_without_requests_wait_for():
    time = ReplicaTime(0.0)
    time.observe(0.0, ReplicaUse(serving=3, busy=1, working=2))
    time.observe(1.0, ReplicaUse(serving=3, busy=1, working=0))
    time.observe(11.0, ReplicaUse(serving=1, busy=1, held=1, leased=1, asleep=2, absent=1))
    assert time.observe(111.0, ReplicaUse()) == {
        "generating": 111, "environment": 2, "slots_exhausted": 20, "gate_closed": 100, "evaluation": 100,
        "asleep": 200, "recovering": 100,
    }  # fmt: skip


def test_shares_are_of_the_time_between_two_looks():
    fleet = [4]
    shares = ReplicaShares(lambda: fleet[0])

    def look(pid, **seconds):
        stats = RolloutStats(pid, 0, 0, (), 0.0, replica_s={"generating": 0.0, "gate_closed": 0.0} | seconds)
        return shares.since_last(stats)

    assert look(1) == {}
    assert look(1, generating=6.0, gate_closed=2.0) == {
        "replica_time/generating": 0.75, "replica_time/gate_closed": 0.25, "rollout/spare_replicas": 0.0
    }  # fmt: skip
    shares.paused(0.25)
    assert look(1, generating=10.0, gate_closed=2.0)["replica_time/gate_closed"] == 0.25
    assert look(1, generating=10.0, gate_closed=2.0) == {}
    assert look(1, generating=10.0, gate_closed=2.0, slots_exhausted=5.0)["rollout/spare_replicas"] == 4.0
    fleet[0] = 6
    spare = look(1, generating=10.0, gate_closed=2.0, slots_exhausted=8.0)["rollout/spare_replicas"]
    assert spare == 6.0, "two have joined"
    assert look(2, generating=3.0, gate_closed=1.0)["replica_time/generating"] == 0.75, "another rollouter begins at 0"
    assert look(2, generating=1.0, gate_closed=3.0)["replica_time/generating"] == 0.25, "so does one that begins to run"
