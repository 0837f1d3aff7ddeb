"""Conformance suite of weight transports: differences, and receivers without their base.

A test class inherits `DeltaSuite` and `TransportSuite`.
"""

from __future__ import annotations

import torch

from asyncrl.errors import WeightTransferError
from asyncrl.weights.encodings.delta_encoder import DeltaEncoder
from asyncrl_testing.transport_rig import (
    PROMPT_S,
    TIMEOUT_S,
    Receive,
    Rig,
    Transfer,
    Trouble,
    Weights,
    contents,
    many_weights,
    plain_weights,
)


def trained(weights: Weights, step: int) -> Weights:
    """`weights` as bfloat16 after a small step: a few elements of each tensor have changed, in some by a bit."""
    generator = torch.Generator().manual_seed(step)
    found: Weights = []
    for name, tensor in weights:
        changed = tensor.bfloat16() if step == 0 else tensor.clone()
        if step and changed.numel():
            places = torch.randint(0, changed.numel(), (1 + changed.numel() // 200,), generator=generator)
            changed.view(torch.int16).view(-1)[places] += 1
        found.append((name, changed))
    return found


class DeltaSuite:
    """Every transport passes these too. Needs a fixture `rig` that returns a `Rig`."""

    def test_differences_make_every_kind_of_tensor(self, rig: Rig) -> None:
        encoder = DeltaEncoder()
        with rig.connected(2) as transfer:
            transfer.publish_encoded(encoder, many_weights(1), delta=False)
            for seed in (2, 3, 3, 1):
                transfer.publish_encoded(encoder, many_weights(seed), delta=True)

    def test_a_small_step_sends_few_bytes(self, rig: Rig) -> None:
        encoder, weights = DeltaEncoder(), trained(plain_weights(), 0)
        with rig.connected(2) as transfer:
            full = transfer.publish_encoded(encoder, weights, delta=False)
            for step in (1, 2):
                weights = trained(weights, step)
                assert transfer.publish_encoded(encoder, weights, delta=True).nbytes < 0.05 * full.nbytes
            assert transfer.publish_encoded(encoder, weights, delta=True).nbytes == 0, "nothing has changed"

    def test_a_receiver_without_the_base_is_named_and_all_weights_repair_it(self, rig: Rig) -> None:
        encoder = DeltaEncoder()
        with rig.connected(2) as transfer:
            transfer.publish(plain_weights(7))  # which nobody keeps
        with rig.connected(1) as transfer:
            transfer.publish_encoded(encoder, plain_weights(1), delta=False)
        with rig.connected(2) as transfer:
            self.refuse(transfer, encoder, 2, r"(?s)receiver 1.*no whole copy of weights")
            transfer.publish_encoded(encoder, plain_weights(3), delta=False)
            transfer.publish_encoded(encoder, plain_weights(4), delta=True)

    def test_a_receiver_that_has_another_base_is_named_with_the_tensor(self, rig: Rig) -> None:
        encoder, weights = DeltaEncoder(), plain_weights(1)
        with rig.connected(1) as transfer:
            transfer.publish_encoded(encoder, weights, delta=False)
            encoder.encode([*weights[:5], ("layer.5", weights[5][1] + 1), *weights[6:]])
            self.refuse(transfer, encoder, 2, r"(?s)receiver 0.*other bytes in layer\.5")
            transfer.publish_encoded(encoder, plain_weights(3), delta=False)

    def test_after_differences_that_a_sink_refused_there_is_no_base(self, rig: Rig) -> None:
        encoder = DeltaEncoder()
        with rig.connected(2) as transfer:
            transfer.publish_encoded(encoder, plain_weights(1), delta=False)
            manifest, tensors = transfer.encoded(encoder, plain_weights(2), delta=True)
            trouble = Trouble("layer.6", text="the engine refuses it")
            match = "(?s)receiver 1.*the engine refuses it"
            transfer.publish_failing(manifest, tensors, WeightTransferError, match, troubles={1: trouble})
            self.refuse(transfer, encoder, 3, r"(?s)no whole copy of weights")
            transfer.publish_encoded(encoder, plain_weights(4), delta=False)
            transfer.publish_encoded(encoder, plain_weights(5), delta=True)

    def test_a_difference_that_is_damaged_is_named_or_has_another_digest(self, rig: Rig) -> None:
        encoder = DeltaEncoder()
        with rig.connected(1) as transfer:
            # Deflated differences have a checksum (damage is named); raw ones only change the digest.
            for position, is_seen in ((60, True), (-1, False)):
                weights = trained(plain_weights(1), 0)
                transfer.publish_encoded(encoder, weights, delta=False)
                later = trained(weights, 1) if is_seen else plain_bits(weights)
                manifest, tensors = transfer.encoded(encoder, later, delta=True)
                name, data = tensors[4]
                data = data.clone()
                data[position] ^= 16
                damaged = [*tensors[:4], (name, data), *tensors[5:]]
                if is_seen:
                    match = r"(?s)layer\.4\.delta.*damaged"
                    transfer.publish_failing(manifest, damaged, WeightTransferError, match)
                    continue
                transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
                transfer.sender.send(manifest, damaged, TIMEOUT_S)
                outcome = transfer.workers[0].outcome()
                assert outcome.digest is not None
                pairs = zip(encoder.digest, outcome.digest, strict=True)
                assert [i for i, (ours, theirs) in enumerate(pairs) if ours != theirs] == [4]

    def test_all_weights_that_are_kept_arrive_as_ever(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            manifest, weights = transfer.encoded(DeltaEncoder(), many_weights(), delta=False)
            bad = [*weights[:5], ("large", torch.zeros(3)), *weights[6:]]
            transfer.publish_failing(manifest, bad, WeightTransferError, "large")
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            digest = transfer.sender.send(manifest, weights, TIMEOUT_S)
            outcome = transfer.workers[0].outcome()
            assert (outcome.tensors, outcome.digest) == (contents(weights), digest)

    def refuse(self, transfer: Transfer, encoder: DeltaEncoder, seed: int, match: str) -> None:
        """Differences that the receivers refuse, soon."""
        manifest, tensors = transfer.encoded(encoder, plain_weights(seed), delta=True)
        outcomes = transfer.publish_failing(manifest, tensors, WeightTransferError, match)
        assert all(outcome.elapsed_s < PROMPT_S for outcome in outcomes)


def plain_bits(weights: Weights) -> Weights:
    """Tensors of random bits, whose differences are raw, without a checksum."""
    generator = torch.Generator().manual_seed(1)
    draws = (torch.randint(0, 256, (t.nbytes,), generator=generator, dtype=torch.uint8) for _, t in weights)
    return [(name, draw.view(t.dtype).view(t.shape)) for (name, t), draw in zip(weights, draws, strict=True)]
