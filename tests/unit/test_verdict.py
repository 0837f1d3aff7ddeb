"""What becomes of each replica of a transfer, as a table."""

import pytest

from asyncrl.driver.publish.verdict import all_late, any_late, blamed, is_gone, is_trainers, verdict
from asyncrl.errors import (
    DeadlineExceeded,
    GenerationError,
    ProcessDied,
    TransferEnded,
    WeightTransferError,
)

NAMES = ("embed.weight", "norm.weight")
SENT, OTHER = (1, 2), (1, 99)
LATE, ENDED = DeadlineExceeded("no bucket within 1 s"), TransferEnded("the sender ended it")
REFUSED, FOREIGN = WeightTransferError("norm.weight is refused"), ValueError("what is this?")
DEAD, CRASHED = ProcessDied("gone"), GenerationError("its engine is dead")


@pytest.mark.parametrize(
    ("sent", "received", "fate", "why"),
    [
        (SENT, SENT, "ok", None),
        (None, None, "ok", None),
        (SENT, OTHER, "wrong", "other bytes in norm.weight"),
        (SENT, None, "wrong", "other bytes in an unknown tensor"),
        (SENT, LATE, "wrong", "no bucket within 1 s"),
        (SENT, ENDED, "wrong", "the sender ended it"),
        (SENT, REFUSED, "wrong", "norm.weight is refused"),
        (SENT, FOREIGN, "wrong", "ValueError: what is this?"),
        (SENT, DEAD, "lost", None),
        (SENT, CRASHED, "lost", None),
        (REFUSED, SENT, "again", None),
        (REFUSED, LATE, "again", None),
        (REFUSED, ENDED, "again", None),
        (LATE, LATE, "again", None),
        (REFUSED, REFUSED, "wrong", "norm.weight is refused"),
        (LATE, FOREIGN, "wrong", "ValueError: what is this?"),
        (REFUSED, DEAD, "lost", None),
        (LATE, CRASHED, "lost", None),
    ],
)
def test_the_fate_of_one_replica(sent, received, fate, why):
    """Beside another one that is fine, or waited for the sender."""
    beside = ENDED if isinstance(sent, BaseException) else sent
    found = verdict(sent, {0: beside, 1: received}, (), NAMES, retries_left=0)
    assert found.fates[1] == fate
    assert (why is None and not found.wrong) or why in found.wrong[1]
    assert found.ok == set() if isinstance(sent, BaseException) else 0 in found.ok


def test_who_a_health_check_did_not_find_is_lost_whatever_it_said():
    found = verdict(SENT, {0: SENT, 1: OTHER, 2: LATE}, {1, 2}, NAMES, retries_left=0)
    assert (found.fates, found.wrong, found.ok) == ({0: "ok", 1: "lost", 2: "lost"}, {}, {0})


@pytest.mark.parametrize(
    ("sent", "received", "lost", "retries_left", "ends", "is_transient"),
    [
        (SENT, ENDED, (), 0, False, False),
        (REFUSED, ENDED, (), 1, True, False),  # nobody else is to blame
        (ENDED, ENDED, (), 1, False, True),  # a connection broke, and everybody is there
        (ENDED, SENT, (), 0, True, True),
        (ENDED, DEAD, (), 0, False, False),
        (LATE, LATE, (), 1, False, True),
        (LATE, LATE, (), 0, True, True),
        (REFUSED, LATE, (), 1, False, True),
        (LATE, LATE, (1,), 0, False, False),  # the one that is lost was
        (REFUSED, REFUSED, (), 0, False, False),  # the one that refused was
        (REFUSED, DEAD, (), 0, False, False),
    ],
)
def test_when_the_error_of_the_sender_ends_the_publish(sent, received, lost, retries_left, ends, is_transient):
    found = verdict(sent, {0: ENDED, 1: received}, lost, NAMES, retries_left=retries_left)
    assert (found.error is sent, found.error is None, found.is_transient) == (ends, not ends, is_transient)


@pytest.mark.parametrize(
    ("is_delta", "strikes", "is_replacement", "follows"),
    [
        (False, 1, False, "retry"),
        (False, 2, False, "retry"),
        (False, 3, False, "replace"),
        (False, 2, True, "retry"),
        (False, 3, True, "stop"),
        (True, 1, False, "full"),
        (True, 9, True, "full"),
    ],
)
def test_what_follows_wrong_weights(is_delta, strikes, is_replacement, follows):
    found = blamed(is_delta=is_delta, strikes=strikes, max_retries=2, is_replacement=is_replacement)
    assert found == follows


def test_whose_failure_it_is():
    assert [is_gone(outcome) for outcome in (SENT, LATE, REFUSED, FOREIGN, DEAD, CRASHED)] == [False] * 4 + [True] * 2
    assert [is_trainers(sent) for sent in (SENT, None, LATE, REFUSED, FOREIGN, DEAD)] == [False] * 4 + [True] * 2
    assert any_late(SENT, {0: SENT, 1: LATE})
    assert any_late(LATE, {0: SENT})
    assert not any_late(REFUSED, {0: ENDED})
    assert all_late([LATE, LATE])
    assert not all_late([LATE, None])
