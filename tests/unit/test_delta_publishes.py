"""When the checkpoint engine sends differences and when all weights, over a scripted trainer and replicas."""

from dataclasses import replace

import pytest

from asyncrl.driver.memory_plan import trainer_plan
from asyncrl.errors import ConfigError, GenerationError, WeightTransferError
from asyncrl.types import ModelFacts
from asyncrl_testing.fake_fleet import WRONG, FakeReplica
from tests.make import quickstart
from tests.unit.test_checkpoint_engine import engine as any_engine


def engine(*replicas, rolling=False, **options):
    return any_engine(*replicas, encoding="delta", own={"encoding": "delta", "rolling": rolling}, **options)


def kinds(trainer):
    """Encoding and base of each transfer."""
    return [(m.encoding, m.base_digest) for m in trainer.sent]


async def test_the_first_publish_is_full_and_kept_and_those_after_it_are_differences():
    made, trainer, _ = engine(FakeReplica(), FakeReplica())
    reports = [await made.publish(version) for version in (1, 2, 3)]
    assert kinds(trainer) == [("full", None), ("delta", (1,)), ("delta", (2,))]
    assert [m.is_kept for m in trainer.sent] == [True, False, False]
    assert [(r.nbytes, r.sent_bytes) for r in reports] == [(80, 80), (80, 6), (80, 6)]
    assert trainer.opened == [2], "one connection for both"


async def test_every_publish_is_verified_whatever_the_schedule():
    made, trainer, _ = engine(FakeReplica(), verify="first", verify_every=3)
    assert all([(await made.publish(version)).verified for version in range(4)])
    assert all(m.verify for m in trainer.sent)


async def test_a_newcomer_among_others_makes_its_publish_full_for_all():
    old, fresh = FakeReplica(), FakeReplica()
    made, trainer, fleet = engine(old, FakeReplica(), respawn=lambda i: fresh)
    await made.publish(1)
    fleet.fail(1, fleet.members[1], "killed")
    await made.publish(2)
    await made.publish(3)
    assert kinds(trainer) == [("full", None), ("full", None), ("delta", (2,))]
    assert (old.committed, fresh.committed) == ([1, 2, 3], [2, 3])


async def test_a_publish_to_newcomers_alone_is_full_and_leaves_the_others_their_base():
    made, trainer, fleet = engine(FakeReplica(), FakeReplica(), respawn=lambda i: FakeReplica())
    trainer.encode_weights = unchanged(trainer)
    await made.publish(1)
    fleet.fail(1, fleet.members[1], "killed")
    await made.publish(1, newcomers_only=True)
    assert await made.publish(1, newcomers_only=True) is None
    await made.publish(2)
    assert kinds(trainer) == [("full", None), ("full", None), ("delta", (1,))]
    assert trainer.opened == [2, 1, 2]


def unchanged(trainer):
    """`encode_weights` of weights that stay the same."""
    fresh = trainer.encode_weights

    async def encode(timeout_s):
        return replace(await fresh(timeout_s), digest=(1,), base_digest=(1,) if len(trainer.encoded) > 1 else None)

    return encode


async def suspended(fleet, trainer):
    """The replica is up as the same process."""
    fleet.suspend(0)


async def missed(fleet, trainer):
    """A publish that this engine did not see."""
    await trainer.encode_weights(1.0)


async def begun_anew(fleet, trainer):
    """An engine that begins knows nothing of what replicas have."""
    return engine(trainer=trainer, fleet=fleet)[0]


@pytest.mark.parametrize("happens", [suspended, missed, begun_anew])
async def test_a_replica_that_lacks_the_base_gets_all_weights(happens):
    made, trainer, fleet = engine(FakeReplica())
    await made.publish(1)
    made = await happens(fleet, trainer) or made
    await made.publish(2)
    assert kinds(trainer) == [("full", None), ("full", None)]


@pytest.mark.parametrize("outcome", [WRONG, WeightTransferError("this replica has another base")])
async def test_what_a_replica_gets_wrong_by_differences_is_repaired_by_all_weights_and_is_no_strike(outcome):
    good, bad = FakeReplica(), FakeReplica()
    made, trainer, fleet = engine(good, bad, max_retries=0)
    await made.publish(1)
    bad.outcomes.append(outcome)
    report = await made.publish(2)
    assert (report.replicas, report.attempts, report.sent_bytes) == (2, 2, (6 + 80) // 2)
    assert fleet.failures == []
    await made.publish(3)
    assert kinds(trainer) == [("full", None), ("delta", (1,)), ("full", None), ("delta", (2,))]
    assert trainer.opened == [2, 1, 2], "the other one served while it was repaired"
    assert len(trainer.encoded) == 3, "once per publish"


async def test_a_publish_that_failed_leaves_no_base():
    made, trainer, _ = engine(FakeReplica())
    await made.publish(1)
    trainer.outcomes.append(WeightTransferError("the weights ended before it"))
    with pytest.raises(WeightTransferError):
        await made.publish(2)
    await made.publish(3)
    assert kinds(trainer) == [("full", None), ("delta", (1,)), ("full", None)]


async def test_a_commit_that_failed_leaves_no_base():
    bad = FakeReplica()
    made, trainer, _ = engine(FakeReplica(), bad, respawn=lambda i: FakeReplica())
    await made.publish(1)
    bad.commit_error = GenerationError("the engine is dead")
    await made.publish(2)
    await made.publish(3)
    assert kinds(trainer) == [("full", None), ("delta", (1,)), ("full", None)]


async def test_differences_that_are_not_smaller_are_not_sent():
    made, trainer, _ = engine(FakeReplica())
    await made.publish(1)
    trainer.difference_bytes = 40
    report = await made.publish(2)
    trainer.difference_bytes = 39
    await made.publish(3)
    assert kinds(trainer) == [("full", None), ("full", None), ("delta", (2,))]
    assert report.sent_bytes == 80


async def test_the_waves_of_a_rolling_publish_send_the_same_differences():
    made, trainer, _ = engine(FakeReplica(), FakeReplica(), rolling=True)
    await made.publish(1)
    trainer.sent.clear()
    report = await made.publish(2)
    assert kinds(trainer) == [("delta", (1,))] * 2
    assert (len(trainer.encoded), report.attempts, report.sent_bytes) == (2, 2, 6)


async def test_without_the_encoding_nothing_is_encoded_or_kept():
    made, trainer, _ = any_engine(FakeReplica())
    reports = [await made.publish(version) for version in (1, 2)]
    assert (trainer.encoded, [m.is_kept for m in trainer.sent]) == ([], [False, False])
    assert [r.sent_bytes for r in reports] == [80, 80]


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["weights.verify=off"], r"weights\.verify=off(?s:.)*digest"),
        (["trainer.lora.rank=8"], r"trainer\.lora\.rank=8(?s:.)*adapters"),
    ],
)
def test_what_differences_cannot_go_with_is_refused_when_the_recipe_is_read(overrides, found):
    with pytest.raises(ConfigError, match=rf"weights\.encoding=delta with {found}"):
        quickstart("weights.encoding=delta", *overrides)


@pytest.mark.parametrize("transport", ["ipc", "collective", "disk"])
def test_a_dry_run_says_what_memory_the_copies_take(transport):
    overrides = ["weights.encoding=delta", f"weights.transport={transport}", "model.inference_dtype=bfloat16"]
    config = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 2048}
    facts = ModelFacts.of_config("some/model", config | {"tie_word_embeddings": True})
    lines = [text for _, text in trainer_plan(quickstart(*overrides), facts)]
    (size,) = [text.split(", ")[1].split(" in ")[0] for text in lines if "bucket(s)" in text]
    (copies,) = [text for text in lines if "delta" in text]
    assert copies.endswith(f"{size} in the trainer rank that sends, {size} in each worker of a replica")
    assert not any("delta" in text for _, text in trainer_plan(quickstart(), facts))
    recipe = quickstart(*overrides)
    for placed, sent, staged in (
        (recipe.placed(ranks_on_gpus=False, replicas_on_gpus=False, stages=True), 1, 1),
        (recipe.placed(ranks_on_gpus=False, replicas_on_gpus=False, stages=False), 1, 0),
        (recipe.placed(ranks_on_gpus=False, replicas_on_gpus=True, stages=True), 1, 0),
        (recipe.placed(ranks_on_gpus=True, replicas_on_gpus=False, stages=True), 0, 0),
    ):
        lines = [text for _, text in trainer_plan(placed, facts)]
        assert lines.count(f"sent from a copy in host memory: {size} in the trainer rank that sends") == sent
        assert lines.count(f"staged in host memory: {size} in each worker of a replica") == staged
