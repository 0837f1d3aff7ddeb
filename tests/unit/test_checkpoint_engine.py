"""A publish as a transaction, over scripted trainer and replicas."""

import asyncio

import pytest

from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import DeadlineExceeded, WeightTransferError
from asyncrl.testing.local import NO_SOURCE
from asyncrl.types import TensorSpec
from asyncrl.weights.checkpoint_engine import CheckpointEngine

pytestmark = pytest.mark.unit

SPECS = (TensorSpec("embed.weight", (4, 4), "float32", 64), TensorSpec("norm.weight", (4,), "float32", 16))


class Trainer:
    def __init__(self):
        self.sent = []

    async def weight_specs(self):
        return SPECS

    async def open_weights(self, transport, bucket_bytes, num_receivers):
        return NO_SOURCE

    async def send_weights(self, manifest, timeout_s):
        self.sent.append(manifest)
        return (1, 2) if manifest.verify else None


class Replica:
    def __init__(self, wrong=0, error=None):
        self.calls, self.wrong, self.error = [], wrong, error

    async def pause(self, mode, timeout_s):
        self.calls.append(("pause", mode))

    async def receive_weights(self, manifest, source, timeout_s):
        self.calls.append(("receive", manifest.publish_id, source.receiver))
        if self.error:
            raise self.error
        if self.wrong and manifest.verify:
            self.wrong -= 1
            return (1, 99)
        return (1, 2) if manifest.verify else None

    async def commit(self, publish_id, version, digest, timeout_s):
        self.calls.append(("commit", publish_id, version, digest))


async def engine(*replicas, interrupt="abort_resume", **config):
    trainer = Trainer()
    made = CheckpointEngine(WeightsConfig(**config), trainer, dict(enumerate(replicas)), interrupt=interrupt)
    await made.open()
    return made, trainer


async def test_a_publish_pauses_sends_and_commits_on_every_replica():
    replicas = Replica(), Replica()
    made, trainer = await engine(*replicas)
    report = await made.publish(7)
    for i, replica in enumerate(replicas):
        assert replica.calls == [("pause", "abort"), ("receive", 1, i), ("commit", 1, 7, (1, 2))]
    assert (report.version, report.verified, report.attempts, report.nbytes) == (7, True, 1, 80)
    assert report.transfer_s <= report.publish_s
    assert sum(b.nbytes for b in trainer.sent[0].buckets) >= 80


@pytest.mark.parametrize(
    ("verify", "expected"),
    [("off", [False] * 5), ("first", [True, False, False, True, False]), ("always", [True] * 5)],
)
async def test_when_digests_are_compared(verify, expected):
    made, trainer = await engine(Replica(), verify=verify, verify_every=3)
    for version in range(5):
        await made.publish(version)
    assert [m.verify for m in trainer.sent] == expected


async def test_other_bytes_are_sent_again_and_verified_again():
    bad, good = Replica(wrong=1), Replica()
    made, trainer = await engine(good, bad, max_retries=1)
    report = await made.publish(3)
    assert (report.attempts, [m.verify for m in trainer.sent]) == (2, [True, True])
    assert bad.calls[-1] == good.calls[-1] == ("commit", 2, 3, (1, 2))


async def test_after_the_retries_the_error_names_replica_and_tensor_and_nothing_is_committed():
    good, bad = Replica(), Replica(wrong=9)
    made, _ = await engine(good, bad, max_retries=2)
    with pytest.raises(WeightTransferError, match=r"3 attempts: replica 1 .*norm\.weight"):
        await made.publish(3)
    assert not [c for r in (good, bad) for c in r.calls if c[0] == "commit"]


async def test_the_error_with_a_cause_comes_before_the_timeout_of_its_peers():
    late = Replica(error=DeadlineExceeded("late"))
    broken = Replica(error=WeightTransferError("tensor x has another shape"))
    made, _ = await engine(late, broken)
    with pytest.raises(WeightTransferError, match="another shape"):
        await made.publish(1)


async def test_replicas_are_paused_by_the_mode_of_the_recipe():
    for interrupt, mode in (("keep", "keep"), ("drain", "drain")):
        replica = Replica()
        made, _ = await engine(replica, interrupt=interrupt)
        await asyncio.wait_for(made.publish(None), 5)
        assert replica.calls[0] == ("pause", mode)
