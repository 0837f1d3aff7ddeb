"""What follows when a process fails: the table of docs/operations.md, row by row."""

import itertools
import re
from pathlib import Path

import pytest

from asyncrl.config.run import RecoveryConfig
from asyncrl.errors import (
    AsyncRLError,
    DeadlineExceeded,
    Process,
    ProcessDied,
    RunFailed,
    TransferEnded,
    WeightTransferError,
    cause,
)
from asyncrl.remote.failure_policy import FailureAction, failure_action

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
