"""A publish that two processes send, as pipeline stages do: each its part, over every transport, and what happens when
one of them fails."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.types import PartsSource
from asyncrl.weights.transports.shared_segment import SHARED_MEMORY
from asyncrl_testing.transport_rig import PROMPT_S, TIMEOUT_S, Hold, Receive, Trouble, Worker, contents, files_in
from asyncrl_testing.transport_sender import Open, Send, SenderProcess, weights_of
from tests.contract.test_transfer_faults import hold as hold
from tests.contract.test_transfer_faults import receivers as receivers
from tests.contract.test_transfer_faults import require_error

pytestmark = pytest.mark.contract

FIRSTS = (0, 4)
"""The second sender sends layer.4 and all after it."""


@pytest.fixture(scope="module")
def senders() -> Iterator[list[SenderProcess]]:
    made = [SenderProcess() for _ in FIRSTS]
    yield made
    for sender in made:
        sender.stop()


class Pair:
    """Two senders and the receivers that have joined both."""

    def __init__(self, transport: str, senders: list[SenderProcess], receivers: list[Worker], directory: Path) -> None:
        self._transport, _, delta = transport.partition(" ")
        self.senders, self.receivers, self._directory = senders, receivers, directory
        self._publishes, self._delta, self._base = 0, delta == "delta", None

    def open(self) -> None:
        for sender in self.senders:
            sender.close()
        command = Open(self._transport, len(self.receivers), str(self._directory))
        source = PartsSource.of([sender.open(command) for sender in self.senders], FIRSTS)
        for number, worker in enumerate(self.receivers):
            worker.join(replace(source, receiver=number))

    def begin(self, send: Send, troubles: dict[int, Trouble] | None = None) -> None:
        self._publishes += 1
        send = replace(send, publish_id=self._publishes, base=self._base, is_kept=self._delta)
        self._base = None
        for number, worker in enumerate(self.receivers):
            worker.begin(Receive(send.manifest, TIMEOUT_S, (troubles or {}).get(number)))
        for number, sender in enumerate(self.senders):
            sender.begin(replace(send, part=(number, FIRSTS)))

    def publish(self, seed: int) -> None:
        """One publish that must succeed."""
        self.begin(Send(0, seed))
        sent = [sender.outcome() for sender in self.senders]
        assert [one.error for one in sent] == [None, None]
        for worker in self.receivers:
            outcome = worker.outcome()
            assert outcome.error is None, outcome.error
            assert outcome.tensors == contents(weights_of(seed, small=False))
            assert outcome.digest == tuple(number for one in sent for number in one.digest or ())
        self._base = seed if self._delta else None

    def files(self) -> set[Path]:
        return files_in((SHARED_MEMORY, self._directory), {pid for sender in self.senders for pid in sender.pids})


LONG = [pytest.param(transport, marks=pytest.mark.slow) for transport in ("collective delta", "disk delta")]


@pytest.fixture(params=["ipc", "collective", "disk", "ipc delta", *LONG])
def pair(request, senders, receivers, tmp_path) -> Iterator[Pair]:
    (tmp_path / "weights").mkdir()
    made = Pair(request.param, senders, receivers, tmp_path / "weights")
    made.open()
    yield made
    for sender in senders:
        sender.close()
    assert made.files() == set()


def test_parts_make_the_whole_publish_after_publish(pair: Pair) -> None:
    pair.publish(1)
    pair.publish(2)
    pair.publish(3)


def test_a_sender_that_is_killed_in_its_part_ends_the_publish(pair: Pair, hold: Hold) -> None:
    pair.publish(1)
    pair.begin(Send(0, 2, hold_at="layer.7", hold=hold))
    hold.reached()
    pair.senders[1].kill()
    assert pair.senders[0].outcome().error is None, "its part had arrived"
    for worker in pair.receivers:
        outcome = worker.outcome()
        require_error(outcome, "TransferEnded")
        assert outcome.elapsed_s < PROMPT_S
    pair.senders[1].start()
    pair.open()
    pair.publish(3)


@pytest.mark.parametrize(("tensor", "failed"), [("layer.1", 0), ("layer.7", 1)])
def test_a_receiver_that_refuses_a_tensor_fails_the_sender_of_its_part(pair: Pair, tensor: str, failed: int) -> None:
    """The other sender is closed by whoever asked them to send: it would wait until its deadline."""
    pair.begin(Send(0, 1, timeout_s=4.0), {1: Trouble(tensor, text="of another shape")})
    outcomes = [worker.outcome() for worker in pair.receivers]
    assert [outcome.error[0] for outcome in outcomes if outcome.error] == ["TransferEnded", "WeightTransferError"]
    sent = [sender.outcome() for sender in pair.senders]
    assert sent[failed].error is not None
    assert "of another shape" in sent[failed].error[1]
    other = sent[1 - failed].error
    assert other is None if failed == 1 else other is not None and other[0] == "DeadlineExceeded"
    pair.publish(2)
