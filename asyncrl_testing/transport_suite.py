"""Conformance suite of weight transports: accepted and refused publishes.

A test class inherits `TransportSuite` and `TransportLifecycleSuite`, and provides the fixture `rig`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from asyncrl.errors import WeightTransferError
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl_testing.transport_rig import (
    BUCKET_BYTES,
    PROMPT_S,
    TIMEOUT_S,
    Receive,
    Rig,
    Trouble,
    contents,
    many_weights,
    plain_weights,
)


class TransportSuite:
    """Every transport passes these. Needs a fixture `rig` that returns a `Rig`."""

    @pytest.mark.parametrize("num_receivers", [1, 2, 3])
    def test_every_kind_of_tensor_arrives(self, rig: Rig, num_receivers: int) -> None:
        with rig.connected(num_receivers) as transfer:
            digest, _ = transfer.publish(many_weights())
        assert digest is not None
        assert len(digest) == len(many_weights())

    def test_publishes_in_a_row_carry_the_new_values(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            digests = [transfer.publish(many_weights(seed))[0] for seed in (1, 2, 3, 1)]
        assert digests[0] == digests[3] != digests[1]

    def test_weights_of_another_shape_use_the_same_ring(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            transfer.publish(plain_weights(1))
            transfer.publish(many_weights(2))
            transfer.publish(plain_weights(3, num=1))

    def test_without_verify_there_is_no_digest(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            digest, _ = transfer.publish(many_weights(), verify=False)
        assert digest is None

    def test_nothing_to_send(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            assert transfer.publish([])[0] == ()
            assert transfer.publish([("a", torch.empty(0)), ("b", torch.empty(0, 3))])[0] == (0, 0)

    @pytest.mark.parametrize(
        ("fault", "match"),
        [
            ("missing_last", r"layer\.11.*\n.*ended before it"),
            ("missing_middle", r"layer\.5.*\n.*layer\.6"),
            ("extra", r"(12|9) tensors\n.*one more: layer\.extra"),
            ("shape", r"layer\.5, float32 \(2048,\)\n.*\(32, 64\)"),
            ("dtype", r"layer\.5, float32.*\n.*float64"),
            ("empty", r"layer\.0.*\n.*ended before it"),
        ],
    )
    def test_weights_that_differ_from_the_manifest(self, rig: Rig, fault: str, match: str) -> None:
        good = plain_weights()
        bad = {
            "missing_last": good[:-1],
            "missing_middle": good[:5] + good[6:],
            "extra": [*good, ("layer.extra", torch.zeros(1))],
            "shape": [*good[:5], ("layer.5", torch.zeros(32, 64)), *good[6:]],
            "dtype": [*good[:5], ("layer.5", torch.zeros(2048, dtype=torch.float64)), *good[6:]],
            "empty": [],
        }[fault]
        with rig.connected(2) as transfer:
            outcomes = transfer.publish_failing(transfer.manifest(good), bad, WeightTransferError, match)
            assert all(o.elapsed_s < PROMPT_S for o in outcomes)
            transfer.publish(plain_weights(1))

    def test_an_error_of_the_weights_themselves_passes_unchanged(self, rig: Rig) -> None:
        def gather() -> Iterator[tuple[str, torch.Tensor]]:
            yield from plain_weights()[:4]
            raise ZeroDivisionError("gather failed")

        with rig.connected(2) as transfer:
            manifest = transfer.manifest(plain_weights())
            outcomes = transfer.publish_failing(manifest, gather(), ZeroDivisionError, "gather failed")
            assert all(o.error is not None and "gather failed" in o.error[1] for o in outcomes)
            assert all(o.elapsed_s < PROMPT_S for o in outcomes)
            transfer.publish(plain_weights(1))

    @pytest.mark.parametrize("tensor", ["layer.0", "layer.6", "layer.11"])
    def test_a_failing_sink_is_named_at_the_sender(self, rig: Rig, tensor: str) -> None:
        with rig.connected(2) as transfer:
            outcomes = transfer.publish_failing(
                transfer.manifest(plain_weights()),
                plain_weights(),
                WeightTransferError,
                "(?s)receiver 1.*the engine refuses it",
                troubles={1: Trouble(tensor, text="the engine refuses it")},
            )
            assert outcomes[1].error == ("WeightTransferError", "the engine refuses it")
            assert outcomes[0].elapsed_s < PROMPT_S
            transfer.publish(plain_weights(1))

    def test_a_sink_that_fails_on_an_empty_tensor_at_the_end(self, rig: Rig) -> None:
        weights = many_weights()
        with rig.connected(1) as transfer:
            transfer.publish_failing(
                transfer.manifest(weights),
                weights,
                WeightTransferError,
                "(?s)receiver 0.*no such tensor",
                troubles={0: Trouble("empty.last", text="no such tensor")},
            )

    def test_a_slow_receiver_reads_no_later_bucket(self, rig: Rig) -> None:
        weights = plain_weights(4)
        with rig.connected(2) as transfer:
            manifest = transfer.manifest(weights)
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            transfer.workers[1].begin(Receive(manifest, TIMEOUT_S, Trouble("layer.2", sleep_s=0.4)))
            digest = transfer.sender.send(manifest, weights, TIMEOUT_S)
            for worker in transfer.workers:
                outcome = worker.outcome()
                assert outcome.tensors == contents(weights)
                assert outcome.digest == digest

    def test_another_manifest_at_a_receiver(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            manifest = transfer.manifest(plain_weights())
            other = replace(manifest, tensors=manifest.tensors[:3], buckets=manifest.buckets[:3])
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            transfer.workers[1].begin(Receive(other, TIMEOUT_S))
            with pytest.raises(WeightTransferError, match=r"receiver 1 expects [03] tensors"):
                transfer.sender.send(manifest, plain_weights(), TIMEOUT_S)
            assert all(w.outcome().error is not None for w in transfer.workers)
            transfer.publish(plain_weights(1))

    def test_buckets_larger_than_the_transports(self, rig: Rig) -> None:
        weights = [("large", torch.zeros(BUCKET_BYTES))]
        with rig.connected(1) as transfer:
            manifest = make_manifest(9, 9, [spec_of(*w) for w in weights], 2 * BUCKET_BYTES)
            with pytest.raises(WeightTransferError, match="bucket_bytes"):
                transfer.sender.send(manifest, weights, TIMEOUT_S)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ("missing", r"tensor 'layer\.4'.*\n.*no tensor of that name"),
            ("shape", r"tensor 'layer\.4'.*\n.*shape \(3,\)"),
        ],
    )
    def test_a_model_that_differs_from_the_manifest(self, rig: Rig, change: str, match: str) -> None:
        weights = plain_weights()
        specs = [spec_of(*w) for w in weights]
        changed = {"missing": [], "shape": [replace(specs[4], shape=(3,), nbytes=12)]}[change]
        model = (*specs[:4], *changed, *specs[5:])
        with rig.connected(2) as transfer:
            manifest = transfer.manifest(weights)
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            transfer.workers[1].begin(Receive(manifest, TIMEOUT_S, model=model))
            with pytest.raises(WeightTransferError, match=f"(?s)receiver 1.*{match}"):
                transfer.sender.send(manifest, weights, TIMEOUT_S)
            other, refusing = (worker.outcome() for worker in transfer.workers)
            assert other.error is not None
            assert other.error[0] == "TransferEnded"
            assert refusing.error is not None
            assert refusing.error[0] == "WeightTransferError"
            assert re.search(match, refusing.error[1])
            transfer.publish(plain_weights(1))

    def test_a_model_with_a_tensor_that_is_not_published(self, rig: Rig) -> None:
        weights = plain_weights()
        model = (*(spec_of(*w) for w in weights), spec_of("layer.extra", torch.zeros(5)))
        with rig.connected(1) as transfer:
            manifest = transfer.manifest(weights)
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S, model=model))
            transfer.sender.send(manifest, weights, TIMEOUT_S)
            outcome = transfer.workers[0].outcome()
            assert outcome.error is not None
            assert "layer.extra" in outcome.error[1]
