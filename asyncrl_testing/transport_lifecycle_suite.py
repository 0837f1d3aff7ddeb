"""Conformance suite of weight transports: receivers that join, leave or are late, and the end of a sender.

A test class inherits `TransportLifecycleSuite` and `TransportSuite`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from asyncrl.errors import DeadlineExceeded, WeightTransferError
from asyncrl.types import Digest, Manifest
from asyncrl.weights.transport import WeightSender
from asyncrl_testing.transport_rig import (
    PROMPT_S,
    TIMEOUT_S,
    Receive,
    Rig,
    Trouble,
    Weights,
    contents,
    plain_weights,
)


class TransportLifecycleSuite:
    """Every transport passes these too. Needs a fixture `rig` that returns a `Rig`."""

    def test_a_receiver_that_never_comes(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            manifest = transfer.manifest(plain_weights())
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="receiver 1"):
                transfer.sender.send(manifest, plain_weights(), 0.5)
            assert 0.4 < time.monotonic() - started < 0.5 + PROMPT_S
            waiting = transfer.workers[0].outcome()
            assert waiting.error is not None
            assert waiting.elapsed_s < PROMPT_S
            transfer.publish(plain_weights(1))

    def test_a_sender_that_never_comes(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            manifest = transfer.manifest(plain_weights())
            transfer.workers[0].begin(Receive(manifest, 0.5))
            outcome = transfer.workers[0].outcome()
            assert outcome.error is not None
            assert outcome.error[0] == "DeadlineExceeded"
            assert 0.4 < outcome.elapsed_s < 0.5 + PROMPT_S
            # What is left of that attempt must not pass for an answer to the same publish sent now. Which error it is
            # depends on whether the sender sees the attempt's end together with its beginning.
            with pytest.raises((DeadlineExceeded, WeightTransferError), match="receiver 0"):
                transfer.sender.send(manifest, plain_weights(), 0.3)
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            transfer.sender.send(manifest, plain_weights(), TIMEOUT_S)
            assert transfer.workers[0].outcome().tensors == contents(plain_weights())

    def test_a_receiver_too_slow_for_the_deadline(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            started = time.monotonic()
            transfer.publish_failing(
                transfer.manifest(plain_weights()),
                plain_weights(),
                DeadlineExceeded,
                "(?s)receiver 1",
                timeout_s=0.8,
                troubles={1: Trouble("layer.3", sleep_s=1.6)},
            )
            assert time.monotonic() - started < 1.6 + PROMPT_S
            transfer.publish(plain_weights(1))

    def test_a_receiver_that_comes_back(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            transfer.publish(plain_weights(1))
            transfer.workers[1].join(replace(transfer.source, receiver=1))
            transfer.publish(plain_weights(2))

    def test_a_receiver_that_is_killed(self, rig: Rig) -> None:
        if not rig.workers_can_die:
            pytest.skip("the receivers of this transport are threads")
        with rig.connected(2) as transfer:
            transfer.publish(plain_weights(1))
            manifest = transfer.manifest(plain_weights())
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            transfer.workers[1].begin(Receive(manifest, TIMEOUT_S, Trouble("layer.3", sleep_s=60)))
            killer = threading.Timer(0.5, transfer.workers[1].kill)
            killer.start()
            started = time.monotonic()
            with pytest.raises(WeightTransferError, match="receiver 1"):
                transfer.sender.send(manifest, plain_weights(), TIMEOUT_S)
            assert time.monotonic() - started < 0.5 + PROMPT_S
            survivor = transfer.workers[0].outcome()
            assert survivor.error is not None
            assert survivor.elapsed_s < 0.5 + PROMPT_S
            killer.join()
            # A restarted process takes over the receiver's number at the next publish.
            transfer.workers[1].start()
            transfer.workers[1].join(replace(transfer.source, receiver=1))
            transfer.publish(plain_weights(2))

    def test_a_sender_that_closes_ends_the_waits(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            transfer.publish(plain_weights(1))
            transfer.workers[0].begin(Receive(transfer.manifest(plain_weights()), TIMEOUT_S))
            time.sleep(0.2)  # either order must pass; this one is the harder
            transfer.sender.close()
            outcome = transfer.workers[0].outcome()
            assert outcome.error is not None
            assert outcome.elapsed_s < PROMPT_S
            transfer.sender.close()
            with pytest.raises(WeightTransferError, match="closed"):
                transfer.sender.send(transfer.manifest(plain_weights()), plain_weights(), TIMEOUT_S)

    def test_a_sender_opens_anew(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            transfer.publish(plain_weights(1))
            source = transfer.sender.open()
            assert source.epoch != transfer.source.epoch
            transfer.workers[0].join(source)
            transfer.publish(plain_weights(2))

    def test_close_leaves_no_file(self, rig: Rig) -> None:
        before = rig.files()
        with rig.connected(1) as transfer:
            transfer.publish(plain_weights(1))
            transfer.publish_failing(transfer.manifest(plain_weights()), [], WeightTransferError, "ended")
        assert rig.files() == before

    def test_a_second_send_is_refused_and_the_first_goes_on(self, rig: Rig) -> None:
        weights = plain_weights(3)
        with rig.connected(1) as transfer:
            first, second = transfer.manifest(weights), transfer.manifest(weights)
            transfer.workers[0].begin(Receive(first, TIMEOUT_S))
            with _sending(transfer.sender, first, weights) as sending:
                with pytest.raises(WeightTransferError, match=r"send publish 2\n.*publish 1 is being sent"):
                    transfer.sender.send(second, weights, TIMEOUT_S)
                sending.go_on.set()
                digest = sending.result.result(TIMEOUT_S)
            outcome = transfer.workers[0].outcome()
            assert outcome.tensors == contents(weights)
            assert outcome.digest == digest
            transfer.publish(plain_weights(4))

    def test_a_receiver_still_in_an_old_publish(self, rig: Rig) -> None:
        weights = plain_weights(2)
        with rig.connected(1) as transfer:
            worker = transfer.workers[0]
            first, second = transfer.manifest(plain_weights(1)), transfer.manifest(weights)
            worker.begin(Receive(first, TIMEOUT_S, Trouble("layer.3", sleep_s=1.2)))
            with pytest.raises(DeadlineExceeded, match="receiver 0"):
                transfer.sender.send(first, plain_weights(1), 0.4)
            with ThreadPoolExecutor(1) as executor:
                sending = executor.submit(transfer.sender.send, second, weights, TIMEOUT_S)
                old = worker.outcome()
                assert old.error is not None
                worker.begin(Receive(second, TIMEOUT_S))
                digest = sending.result(TIMEOUT_S)
            new = worker.outcome()
            assert new.tensors == contents(weights)
            assert new.digest == digest

    def test_a_receiver_of_an_old_publish_hears_of_the_new_one(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            old, new = transfer.manifest(plain_weights()), transfer.manifest(plain_weights())
            transfer.workers[0].begin(Receive(old, TIMEOUT_S))
            with pytest.raises(DeadlineExceeded, match="receiver 0"):
                transfer.sender.send(new, plain_weights(), 1.0)
            outcome = transfer.workers[0].outcome()
            assert outcome.error is not None
            assert outcome.error[0] == "TransferEnded"
            assert "publish 2" in outcome.error[1]
            assert outcome.elapsed_s < PROMPT_S

    def test_closing_ends_a_send_in_progress(self, rig: Rig) -> None:
        before = rig.files()
        weights = plain_weights()
        with rig.connected(2) as transfer:
            manifest = transfer.manifest(weights)
            for worker in transfer.workers:
                worker.begin(Receive(manifest, TIMEOUT_S))
            with _sending(transfer.sender, manifest, weights) as sending, ThreadPoolExecutor(1) as executor:
                closing = executor.submit(transfer.sender.close)
                time.sleep(0.2)  # close comes first: the send is to end although it could go on
                assert not closing.done()
                sending.go_on.set()
                with pytest.raises(WeightTransferError, match="closed meanwhile"):
                    sending.result.result(PROMPT_S)
                closing.result(PROMPT_S)
            for worker in transfer.workers:
                outcome = worker.outcome()
                assert outcome.error is not None
                assert outcome.error[0] == "TransferEnded"
                assert outcome.elapsed_s < PROMPT_S
            assert rig.files() == before
            source = transfer.sender.open()
            for number, worker in enumerate(transfer.workers):
                worker.join(replace(source, receiver=number))
            transfer.publish(plain_weights(1))

    def test_closing_ends_a_send_that_waits_for_receivers(self, rig: Rig) -> None:
        with rig.connected(1) as transfer, ThreadPoolExecutor(1) as executor:
            sending = executor.submit(transfer.sender.send, transfer.manifest(plain_weights()), [], TIMEOUT_S)
            time.sleep(0.2)  # either order must pass; this one is the harder
            started = time.monotonic()
            transfer.sender.close()
            assert time.monotonic() - started < PROMPT_S
            with pytest.raises((WeightTransferError, DeadlineExceeded)):
                sending.result(PROMPT_S)


@dataclass(frozen=True, slots=True)
class _Sending:
    """A send in another thread that waits in the middle of its weights for `go_on`."""

    result: Future[Digest | None]
    go_on: threading.Event


@contextmanager
def _sending(sender: WeightSender, manifest: Manifest, weights: Weights) -> Iterator[_Sending]:
    reached, go_on = threading.Event(), threading.Event()

    def held() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:3]
        reached.set()
        assert go_on.wait(TIMEOUT_S), "the test did not go on"
        yield from weights[3:]

    with ThreadPoolExecutor(1) as executor:
        sending = _Sending(executor.submit(sender.send, manifest, held(), TIMEOUT_S), go_on)
        assert reached.wait(TIMEOUT_S), "the send did not take its weights"
        try:
            yield sending
        finally:
            go_on.set()
