"""What follows when a process fails: the table of docs/operations.md, row by row."""

import itertools
import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.run import RecoveryConfig
from asyncrl.driver.fleet.membership import (
    AWAY_AFTER,
    FORGETS,
    TRANSITIONS,
    Event,
    Member,
    Membership,
    PoolSettings,
    after_failure,
)
from asyncrl.errors import (
    AsyncRLError,
    DeadlineExceeded,
    NoPlace,
    Process,
    ProcessDied,
    RunFailed,
    TransferEnded,
    WeightTransferError,
    cause,
)
from asyncrl.remote.failure_policy import FailureAction, RestartBudget, failure_action
from asyncrl.types import ReplicaState

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
PROCESSES = {
    "replica": Process("replica", 1),
    "rollouter": Process("rollouter"),
    "message queue": Process("message queue"),
    "trainer rank": Process("trainer rank", 0),
    "none to blame": None,
}
ERRORS: dict[str, list[BaseException | str]] = {
    "late": [DeadlineExceeded("no answer")],
    "died": [ProcessDied("gone")],
    "any other error": [WeightTransferError("a tensor is missing"), RuntimeError("a bug"), RunFailed("spent")],
    "wrong weights": ["it has other bytes in lm_head"],
}
REJOINS = ", and `recovery.rejoin_timeout_s` is over 0"


def rows():
    lines = re.findall(r"^\| (.+?) \| (.+?) \| (yes|no|yes, no) \| (.+?) \|$", OPERATIONS.read_text(), re.MULTILINE)
    assert len(lines) >= 12
    for processes, happened, left, follows in lines:
        rejoins = happened.endswith(REJOINS)
        kinds = happened.removesuffix(REJOINS).split(", ")
        for process, kind, restarts_left in itertools.product(processes.split(", "), kinds, left.split(", ")):
            yield process, kind, restarts_left == "yes", rejoins, follows


@pytest.mark.parametrize(("process", "kind", "restarts_left", "may_rejoin", "follows"), list(rows()))
def test_the_table_of_the_operations_page(process, kind, restarts_left, may_rejoin, follows):
    for error in ERRORS[kind]:
        found = failure_action(PROCESSES[process], error, restarts_left=restarts_left, may_rejoin=may_rejoin)
        assert found is FailureAction(follows)


def test_the_table_is_complete():
    told = {(process, kind, left) for process, kind, left, rejoins, _ in rows() if not rejoins}
    wanted = set(itertools.product(PROCESSES, ("late", "died", "any other error"), (True, False)))
    assert wanted <= told


@pytest.mark.parametrize(
    ("errors", "first"),
    [
        ([DeadlineExceeded("late"), ProcessDied("gone"), RunFailed("spent")], 1),
        ([TransferEnded("the other end"), DeadlineExceeded("late")], 1),
        ([RuntimeError("connection closed"), WeightTransferError("a tensor is missing")], 1),
        ([TimeoutError(), ValueError("a bug")], 1),
        ([ValueError("a bug"), TransferEnded("the other end")], 1),
        ([RunFailed("first"), AsyncRLError("second")], 0),
    ],
)
def test_the_cause_of_errors_that_came_together(errors, first):
    assert cause(errors) is errors[first]


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "num_replicas", "restarts"), [(None, 1, 3), (None, 64, 64), (2, 64, 2), (0, 8, 0)])
def test_the_budget_of_replacements_grows_with_the_replicas_unless_it_is_set(asked, num_replicas, restarts):
    assert RecoveryConfig(max_replica_restarts=asked).replica_restarts(num_replicas) == restarts


@pytest.mark.parametrize(("asked", "num_replicas", "lost"), [(None, 64, 4), (2, 64, 3), (0, 8, 1), (100, 8, 4)])
def test_one_response_does_not_spend_a_large_budget(asked, num_replicas, lost):
    assert RecoveryConfig(max_replica_restarts=asked).replicas_per_response(num_replicas) == lost


# -- the states of a replica: every event in every state ---------------------------------------------------------------


TABLE = """
             started   committed  hold      lease   lease_ended  fenced    late       answered  failed  leave
starting     newcomer  -          -         -       -            -         -          -         dead    leaving
newcomer     -         serving    newcomer  -       -            newcomer  suspended  -         dead    leaving
serving      -         serving    held      leased  -            newcomer  suspended  -         dead    leaving
held         -         serving    held      -       -            newcomer  suspended  -         dead    leaving
leased       -         -          -         -       newcomer     newcomer  suspended  -         dead    leaving
suspended    -         -          -         -       -            -         -          newcomer  dead    leaving
leaving      -         -          -         -       -            -         -          -         -       -
dead         -         -          -         -       -            -         -          -         -       leaving
"""
WAYS: dict[ReplicaState, tuple[Event, ...]] = {
    "starting": (),
    "newcomer": ("started",),
    "serving": ("started", "committed"),
    "held": ("started", "committed", "hold"),
    "leased": ("started", "committed", "lease"),
    "suspended": ("started", "late"),
    "leaving": ("started", "committed", "leave"),
    "dead": ("failed",),
}


def membership(max_restarts=2, restart_delay_s=3.0):
    return Membership([0, 1], RestartBudget(max_restarts, 3600), restart_delay_s=restart_delay_s)


def in_state(state):
    made = membership()
    for event in WAYS[state]:
        made.apply(0, event)
    assert made.members[0].state == state
    return made


def cells():
    head, *rows = [line.split() for line in TABLE.strip().splitlines()]
    assert set(head) == set(get_args(Event)) == set(TRANSITIONS)
    assert {row[0] for row in rows} == set(get_args(ReplicaState))
    return [(row[0], event, after) for row in rows for event, after in zip(head, row[1:], strict=True)]


@pytest.mark.parametrize(("state", "event", "after"), cells())
def test_the_table(state, event, after):
    made = in_state(state)
    before = made.members[0].incarnation
    assert made.may(0, event) == (after != "-")
    if after == "-":
        with pytest.raises(ValueError, match=f"replica 0 is {state}: {event}"):
            made.apply(0, event)
        return
    made.apply(0, event)
    assert made.members[0].state == after
    assert made.members[0].incarnation == before + (event in FORGETS)
    assert made.members[1].state == "starting", "the others stay as they are"


def test_a_version_lasts_as_long_as_the_weights_are_served():
    made = in_state("serving")
    made.apply(0, "committed", 4)
    made.apply(0, "hold")
    made.apply(0, "committed")
    assert made.members[0].version == 4
    made.apply(0, "lease")
    assert made.members[0].version == 4
    made.apply(0, "lease_ended")
    assert made.members[0].version is None


def test_failures_in_a_row_wait_longer_and_one_that_had_served_does_not():
    made = membership(max_restarts=9)
    delays = []
    for serves in (False, False, True, False, False):
        made.apply(0, "started")
        if serves:
            made.apply(0, "committed")
        made.apply(0, "failed")
        delays.append(made.replace(0))
    assert delays == [3, 6, 0, 3, 6]


def test_a_spent_budget_leaves_it_dead_and_counts_for_all():
    made = membership(max_restarts=1)
    made.apply(0, "failed")
    assert made.replace(0) is not None
    made.apply(1, "failed")
    assert made.replace(1) is None
    assert made.members[1].state == "dead"


def test_who_joins_again_under_an_id_is_another_incarnation_and_nobody_goes_without_leaving():
    made = in_state("leaving")
    former, before = made.members[0].incarnation, made.generation
    made.drop(0)
    assert (0 in made.members, made.generation) == (False, before + 1)
    made.add(0)
    assert (made.members[0].state, made.members[0].incarnation > former) == ("starting", True)
    made.add(7)
    assert (made.members[7].incarnation, made.generation) == (0, before + 3)
    with pytest.raises(ValueError, match="replica 7 is there, starting"):
        made.add(7)
    with pytest.raises(ValueError, match="it has to leave first"):
        made.drop(7)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from(get_args(Event)), st.sampled_from([None, 1, 2])), max_size=60)
)
def test_every_change_has_a_generation_of_its_own_and_what_is_forgotten_an_incarnation(events):
    made = membership(max_restarts=99)
    for replica_id, event, version in events:
        before = made.generation, [(m.state, m.incarnation, m.version) for m in made.members.values()]
        if not made.may(replica_id, event):
            continue
        made.apply(replica_id, event, version)
        if event == "failed":
            made.replace(replica_id)
        after = made.generation, [(m.state, m.incarnation, m.version) for m in made.members.values()]
        assert (before[0] == after[0]) == (before[1] == after[1])
        assert after[0] >= before[0]
        member = made.members[replica_id]
        assert member.version is None or member.state in ("serving", "held", "leased")


LATE, GONE, NOWHERE = DeadlineExceeded("no answer"), ProcessDied("gone"), NoPlace("no node has room")


@pytest.mark.parametrize(
    ("member", "why", "others_up", "settings", "follows"),
    [
        (Member("serving"), LATE, 1, {"rejoin_timeout_s": 5}, "suspend"),
        (Member("leased"), LATE, 0, {"rejoin_timeout_s": 5}, "suspend"),
        (Member("serving"), LATE, 1, {}, "replace"),
        (Member("suspended"), LATE, 1, {"rejoin_timeout_s": 5}, "replace"),
        (Member("starting"), LATE, 1, {"rejoin_timeout_s": 5}, "replace"),
        (Member("serving"), GONE, 1, {"rejoin_timeout_s": 5}, "replace"),
        (Member("serving"), "wrong weights", 1, {"rejoin_timeout_s": 5}, "replace"),
        (Member("starting"), NOWHERE, 1, {"is_resized": True}, "leave"),
        (Member("starting"), NOWHERE, 0, {"is_resized": True}, "replace"),
        (Member("starting"), NOWHERE, 1, {}, "replace"),
        (Member("starting", failures=AWAY_AFTER), GONE, 2, {"quorum": 2}, "stay_away"),
        (Member("starting", failures=AWAY_AFTER), GONE, 1, {"quorum": 2}, "replace"),
        (Member("starting", failures=AWAY_AFTER - 1), GONE, 2, {"quorum": 2}, "replace"),
        (Member("starting", failures=AWAY_AFTER, served=True), GONE, 2, {"quorum": 2}, "replace"),
        (Member("starting", failures=AWAY_AFTER), GONE, 2, {}, "replace"),
    ],
)
def test_what_becomes_of_a_replica_that_failed(member, why, others_up, settings, follows):
    times = {"start_timeout_s": 5, "health_interval_s": 1, "health_timeout_s": 1}
    found = after_failure(0, member, why, others_up=others_up, settings=PoolSettings(2, **times, **settings))
    assert found == follows
