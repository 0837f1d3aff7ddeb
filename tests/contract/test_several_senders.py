"""A publish that two processes send, as pipeline stages do: each its part, over every transport, and what happens when
one of them fails."""

from collections.abc import Iterator

import pytest

from asyncrl_testing.transport_rig import Hold, Trouble
from asyncrl_testing.transport_sender import Send, SenderProcess
from tests.contract.test_transfer_faults import Group
from tests.contract.test_transfer_faults import hold as hold
from tests.contract.test_transfer_faults import receivers as receivers

FIRSTS = (0, 4)
"""The second sender sends layer.4 and all after it."""


@pytest.fixture(scope="module")
def senders() -> Iterator[list[SenderProcess]]:
    made = [SenderProcess() for _ in FIRSTS]
    yield made
    for sender in made:
        sender.stop()


LONG = [pytest.param(transport, marks=pytest.mark.slow) for transport in ("collective delta", "disk delta")]


@pytest.fixture(params=["ipc", "collective", "disk", "ipc delta", *LONG])
def pair(request, senders, receivers, tmp_path) -> Iterator[Group]:
    (tmp_path / "weights").mkdir()
    transport, _, delta = request.param.partition(" ")
    made = Group(transport, senders, receivers, tmp_path / "weights", delta == "delta", firsts=FIRSTS)
    made.open()
    yield made
    for sender in senders:
        sender.close()
    assert made.files() == set()


def test_parts_make_the_whole_publish_after_publish(pair: Group) -> None:
    pair.publish(1)
    pair.publish(2)
    pair.publish(3)


def test_a_sender_that_is_killed_in_its_part_ends_the_publish(pair: Group, hold: Hold) -> None:
    pair.publish(1)
    pair.begin(Send(0, 2, hold_at="layer.7", hold=hold))
    hold.reached()
    pair.senders[1].kill()
    assert pair.senders[0].outcome().error is None, "its part had arrived"
    pair.require_dropped(pair.outcomes())
    pair.senders[1].start()
    for sender in pair.senders:
        sender.close()
    pair.open()
    pair.publish(3)


@pytest.mark.parametrize(("tensor", "failed"), [("layer.1", 0), ("layer.7", 1)])
def test_a_receiver_that_refuses_a_tensor_fails_the_sender_of_its_part(pair: Group, tensor: str, failed: int) -> None:
    """The other sender is closed by whoever asked them to send: it would wait until its deadline."""
    pair.begin(Send(0, 1, timeout_s=4.0), {1: Trouble(tensor, text="of another shape")})
    outcomes = pair.outcomes()
    assert [outcome.error[0] for outcome in outcomes if outcome.error] == ["TransferEnded", "WeightTransferError"]
    sent = [sender.outcome() for sender in pair.senders]
    assert sent[failed].error is not None
    assert "of another shape" in sent[failed].error[1]
    other = sent[1 - failed].error
    assert other is None if failed == 1 else other is not None and other[0] == "DeadlineExceeded"
    pair.publish(2)
