"""A publish as a transaction per replica, over a scripted trainer and replicas."""

import asyncio

import pytest

from asyncrl.config.weights import WeightsConfig
from asyncrl.driver.cluster.placement import Machines
from asyncrl.driver.publish.checkpoint_engine import CheckpointEngine
from asyncrl.errors import DeadlineExceeded, GenerationError, ProcessDied, TransferEnded, WeightTransferError
from asyncrl.inference.replica import Replica
from asyncrl_testing.fake_fleet import WRONG, FakeFleet, FakeReplica, FakeTrainer


def engine(*replicas, trainer=None, fleet=None, respawn=None, own=None, **config):
    """An engine of these replicas; `own`: its own arguments beside the section `weights` of a recipe."""
    trainer, fleet = trainer or FakeTrainer(), fleet or FakeFleet(*replicas, respawn=respawn)
    arguments = {"interrupt": "abort_resume", "blame_s": 0.01, **(own or {})}
    return CheckpointEngine(WeightsConfig(**config), trainer, fleet, **arguments), trainer, fleet


class Slow(FakeReplica):
    async def receive_weights(self, manifest, source, timeout_s):
        await asyncio.sleep(0.03)
        return await super().receive_weights(manifest, source, timeout_s)


async def test_a_publish_pauses_sends_and_commits_on_every_replica():
    replicas = FakeReplica(), FakeReplica()
    made, trainer, fleet = engine(*replicas)
    report = await made.publish(7)
    for i, replica in enumerate(replicas):
        assert replica.calls == [("pause", "abort"), ("receive", 1, i), ("commit", 1, 7, (1, 2))]
    assert (report.version, report.verified, report.attempts, report.nbytes, report.replicas) == (7, True, 1, 80, 2)
    assert report.transfer_s <= report.pause_s <= report.publish_s
    assert sum(b.nbytes for b in trainer.sent[0].buckets) >= 80
    assert fleet.newcomers == {}


async def test_a_publish_says_what_its_tensors_are_and_refuses_those_that_are_none_of_it():
    made, trainer, _ = engine(FakeReplica())
    await made.publish(1)
    assert trainer.sent[0].encoding == "full"
    made, trainer, _ = engine(FakeReplica(), own={"encoding": "lora"})
    with pytest.raises(WeightTransferError, match=r"embed\.weight(?s:.)*no factor"):
        await made.publish(1)
    assert trainer.sent == []


@pytest.mark.parametrize(
    ("verify", "expected"),
    [("off", [False] * 5), ("first", [True, False, False, True, False]), ("always", [True] * 5)],
)
async def test_when_digests_are_compared(verify, expected):
    made, trainer, _ = engine(FakeReplica(), verify=verify, verify_every=3)
    for version in range(5):
        await made.publish(version)
    assert [m.verify for m in trainer.sent] == expected
    assert trainer.opened == [1]


async def test_wrong_bytes_are_sent_again_to_that_replica_alone_while_the_others_serve():
    bad, good = FakeReplica(WRONG), FakeReplica()
    made, trainer, fleet = engine(good, bad, max_retries=1)
    report = await made.publish(3)
    assert (report.attempts, report.replicas, [m.verify for m in trainer.sent]) == (2, 2, [True, True])
    assert good.calls == [("pause", "abort"), ("receive", 1, 0), ("commit", 1, 3, (1, 2))]
    assert bad.calls[-2:] == [("receive", 2, 0), ("commit", 2, 3, (1, 2))]
    assert fleet.failures == []
    await made.publish(4)
    assert trainer.opened == [2, 1, 2]


async def test_after_the_retries_the_replica_is_replaced_and_joins_the_next_publish():
    good, bad, fresh = FakeReplica(), FakeReplica(WRONG, WRONG), FakeReplica()
    made, _, fleet = engine(good, bad, max_retries=1, respawn=lambda i: fresh)
    report = await made.publish(3)
    assert (report.replicas, report.attempts) == (1, 2)
    assert (good.committed, bad.committed, fresh.committed) == ([3], [], [])
    ((failed, why),) = fleet.failures
    assert failed == 1
    assert "norm.weight" in why
    assert fleet.newcomers == {1: fresh}
    await made.publish(4)
    assert (good.committed, fresh.committed) == ([3, 4], [4])


async def test_a_replacement_that_got_good_weights_is_trusted_again():
    spare = [FakeReplica(), FakeReplica()]
    made, _, fleet = engine(
        FakeReplica(), FakeReplica(WRONG), max_retries=0, verify="always", respawn=lambda i: spare.pop()
    )
    await made.publish(1)
    await made.publish(2)
    fleet.members[1].outcomes.append(WRONG)
    report = await made.publish(3)
    assert report.replicas == 1
    assert len(fleet.failures) == 2


DEAD = ProcessDied("gone"), GenerationError("the engine of replica 1 is dead")


@pytest.mark.parametrize("error", DEAD)
async def test_a_replica_that_is_gone_during_a_transfer_is_replaced_and_the_others_are_published_to(error):
    good, dead = FakeReplica(TransferEnded("the sender ended it")), FakeReplica(error)
    made, _, fleet = engine(good, dead, trainer=FakeTrainer([WeightTransferError("receiver 1 is gone")]))
    report = await made.publish(5)
    assert (good.committed, dead.committed, report.replicas) == ([5], [], 1)
    assert [i for i, _ in fleet.failures] == [1]


async def test_a_replica_that_answers_nothing_is_told_from_those_that_waited_for_it():
    late = DeadlineExceeded("no answer within 1 s")
    waiting, stopped = FakeReplica(late), FakeReplica(late)
    stopped.alive = False
    trainer = FakeTrainer([DeadlineExceeded("receiver 1 did not take bucket 3")])
    made, trainer, fleet = engine(waiting, stopped, trainer=trainer)
    await made.publish(2)
    assert (waiting.committed, stopped.committed) == ([2], [])
    assert [i for i, _ in fleet.failures] == [1]
    assert trainer.opened == [2, 1]


async def test_a_transfer_that_was_late_without_a_culprit_is_tried_again_then_told():
    late = DeadlineExceeded("receiver 0 did not take bucket 3")
    made, _, _ = engine(FakeReplica(late), trainer=FakeTrainer([late]), max_retries=1)
    assert (await made.publish(1)).attempts == 2
    made, _, _ = engine(FakeReplica(late, late), trainer=FakeTrainer([late, late]), max_retries=1)
    with pytest.raises(DeadlineExceeded, match="bucket 3"):
        await made.publish(1)


async def test_what_the_trainer_did_wrong_is_not_blamed_on_replicas():
    for error in (WeightTransferError("publish tensor 3: the weights ended before it"), ZeroDivisionError("gather")):
        replica = FakeReplica(TransferEnded("the sender ended it"))
        made, _, fleet = engine(replica, trainer=FakeTrainer([error]))
        with pytest.raises(type(error), match=str(error)):
            await made.publish(1)
        assert (fleet.failures, replica.committed) == ([], [])


async def test_what_a_replica_refuses_by_name_ends_the_run_by_name():
    refusal = "tensor 'norm.weight' (4,) float32: the model's has shape (5,)"

    def refusing(_=0):
        return FakeReplica(*[WeightTransferError(refusal)] * 2)

    sends = [WeightTransferError("receiver 0 to take the weights")] * 4
    made, _, fleet = engine(refusing(), trainer=FakeTrainer(sends), respawn=refusing, max_retries=1)
    with pytest.raises(WeightTransferError, match=r"norm\.weight"):
        await made.publish(1)
    assert len(fleet.failures) == 1


async def test_newcomers_alone_are_brought_to_the_version():
    first, second = FakeReplica(), FakeReplica()
    made, _, fleet = engine(first, second, respawn=lambda i: FakeReplica())
    await made.publish(1)
    assert await made.publish(1, newcomers_only=True) is None
    fleet.fail(0, first, "killed")
    report = await made.publish(1, newcomers_only=True)
    assert report.replicas == 1
    assert fleet.members[0].committed == [1]
    assert second.committed == [1]


async def test_every_worker_of_a_replica_is_a_receiver():
    replicas = FakeReplica(), FakeReplica()
    made, trainer, _ = engine(*replicas, own={"receivers_per_replica": 4})
    await made.publish(1)
    assert trainer.opened == [8]
    assert [r.calls[1][2] for r in replicas] == [0, 4]


async def test_publishes_do_not_overlap():
    replica = Slow()
    made, _, _ = engine(replica)
    await asyncio.gather(*(made.publish(v) for v in (1, 2, 3)))
    assert [c[0] for c in replica.calls] == ["pause", "receive", "commit"] * 3
    assert replica.committed == [1, 2, 3]


async def test_without_any_replica_the_publish_ends_with_a_name():
    made, _, _ = engine(FakeReplica(pause_error=ProcessDied("gone")))
    with pytest.raises(DeadlineExceeded, match="no replica is up"):
        await made.publish(1)


async def test_replicas_are_paused_by_the_mode_of_the_recipe():
    for interrupt, mode in (("keep", "keep"), ("drain", "drain")):
        replica = FakeReplica()
        made, _, _ = engine(replica, own={"interrupt": interrupt})
        await asyncio.wait_for(made.publish(None), 5)
        assert replica.calls[0] == ("pause", mode)


async def test_a_replica_that_dies_after_its_commit_serves_no_more_and_neither_does_its_replacement():
    early, fresh = FakeReplica(), FakeReplica()

    class Twice(FakeReplica):
        """Needs a second transfer; in that one the other replica dies, which has committed."""

        async def receive_weights(self, manifest, source, timeout_s):
            if early.committed:
                fleet.fail(0, early, "killed")
            return await super().receive_weights(manifest, source, timeout_s)

    made, _, fleet = engine(early, Twice(WRONG), respawn=lambda i: fresh)
    report = await made.publish(6)
    assert (early.committed, fleet.members[1].committed, fresh.committed) == ([6], [6], [])
    assert (report.replicas, report.attempts, fleet.newcomers) == (1, 2, {0: fresh})
    assert (await made.publish(6, newcomers_only=True)).replicas == 1
    assert (fresh.committed, fleet.newcomers) == ([6], {})


@pytest.mark.parametrize("newcomers_only", [False, True])
async def test_the_replacement_of_a_replica_with_wrong_bytes_is_verified_whatever_the_schedule(newcomers_only):
    version = 2 if newcomers_only else 3
    for outcomes in ([], [WRONG]):
        bad, fresh = FakeReplica(), FakeReplica(*outcomes)
        made, trainer, fleet = engine(
            FakeReplica(), bad, max_retries=0, verify="first", verify_every=2, respawn=lambda i, made=fresh: made
        )
        await made.publish(0)
        await made.publish(1)
        bad.outcomes.append(WRONG)
        await made.publish(2)
        assert [m.verify for m in trainer.sent] == [True, False, True]
        if outcomes:
            with pytest.raises(WeightTransferError, match=r"(?s)replica 1,.*norm\.weight"):
                await made.publish(version, newcomers_only=newcomers_only)
        else:
            assert (await made.publish(version, newcomers_only=newcomers_only)).verified
        assert trainer.sent[-1].verify
        assert (len(fleet.failures), fresh.committed) == (1, [] if outcomes else [version])


@pytest.mark.parametrize("error", [*DEAD, DeadlineExceeded("no answer within 1 s"), ValueError("what is this?")])
@pytest.mark.parametrize(("where", "stage"), [("pause_error", False), ("commit_error", False), ("commit_error", True)])
async def test_one_replica_that_is_gone_or_late_or_raises_something_foreign_is_replaced(where, stage, error):
    good, bad, fresh = FakeReplica(), FakeReplica(**{where: error}), FakeReplica()
    made, _, fleet = engine(good, bad, stage=stage, respawn=lambda i: fresh)
    report = await made.publish(5)
    assert (good.committed, bad.committed, fresh.committed, report.replicas) == ([5], [], [], 1)
    assert fleet.failures == [(1, str(error))]
    assert fleet.newcomers == {1: fresh}


@pytest.mark.parametrize("where", ["pause_error", "commit_error"])
async def test_when_all_replicas_are_late_the_deadline_is_told_and_none_is_replaced(where):
    late = DeadlineExceeded("no answer within 1 s")
    made, _, fleet = engine(FakeReplica(**{where: late}), FakeReplica(**{where: late}))
    with pytest.raises(DeadlineExceeded, match="within 1 s"):
        await made.publish(5)
    assert (fleet.failures, len(fleet.members)) == ([], 2)


async def test_lateness_without_a_culprit_is_counted_apart_from_attempts_that_had_one():
    ended, late = TransferEnded("the sender ended it"), DeadlineExceeded("receiver 0 did not take bucket 3")
    good, dead = FakeReplica(ended, late), FakeReplica(ProcessDied("gone"))
    made, trainer, fleet = engine(
        good, dead, trainer=FakeTrainer([WeightTransferError("receiver 1 is gone"), late]), max_retries=1
    )
    assert (await made.publish(1)).attempts == 3
    assert (good.committed, [i for i, _ in fleet.failures]) == ([1], [1])
    good.outcomes += [late, late]
    trainer.outcomes += [late, late]
    with pytest.raises(DeadlineExceeded, match="bucket 3"):
        await made.publish(2)
    assert len(trainer.sent) == 5


@pytest.mark.parametrize("waits", [False, True])  # True: the sender does not notice, until it is interrupted
@pytest.mark.parametrize("times", [1, 2])
async def test_a_broken_connection_between_healthy_processes_is_formed_again_as_often_as_retries_allow(waits, times):
    broken = TransferEnded("connection closed by peer")
    trainer = FakeTrainer([broken] * (times - waits), waits=waits)
    replicas = [FakeReplica(*[broken] * times) for _ in range(2)]
    made, trainer, fleet = engine(*replicas, trainer=trainer, max_retries=1, transfer_timeout_s=5)
    publishing = asyncio.wait_for(made.publish(4), 4)
    if times == 1:
        assert ((await publishing).attempts, [r.committed for r in replicas]) == (2, [[4], [4]])
    else:
        with pytest.raises(TransferEnded):
            await publishing
    assert (trainer.opened, fleet.failures) == ([2, 2], [])


async def test_catching_up_does_not_use_up_the_schedule_of_digests():
    made, trainer, fleet = engine(
        FakeReplica(), FakeReplica(), verify="first", verify_every=3, respawn=lambda i: FakeReplica()
    )
    await made.publish(0)
    assert await made.publish(0, newcomers_only=True) is None
    fleet.fail(1, fleet.members[1], "killed")
    assert (await made.publish(0, newcomers_only=True)).verified
    verified = [(await made.publish(version)).verified for version in (1, 2, 3, 4)]
    assert verified == [False, False, True, False]
    assert len(trainer.sent) == 6


@pytest.mark.parametrize(
    ("error", "opened", "attempts", "served"),
    [
        (ProcessDied("gone"), [2, 1], 2, 1),
        (GenerationError("the engine is dead"), [2, 1], 2, 1),
        (WeightTransferError("tensor 'norm.weight' is refused"), [2, 2], 2, 2),
        (ValueError("what is this?"), [2, 2], 2, 2),
    ],
)
async def test_a_receiver_that_fails_before_the_sender_knows_interrupts_it(error, opened, attempts, served):
    good, bad = FakeReplica(TransferEnded("the sender ended it")), FakeReplica(error)
    made, trainer, fleet = engine(good, bad, trainer=FakeTrainer(waits=True), max_retries=1, transfer_timeout_s=5)
    report = await asyncio.wait_for(made.publish(4), 4)
    assert trainer.interrupted.is_set()
    assert trainer.opened == opened, "a sending end that was closed cannot be sent from again"
    assert (report.attempts, report.replicas, good.committed) == (attempts, served, [4])
    assert [i for i, _ in fleet.failures] == [1] * (2 - served)


async def test_a_sender_that_hears_of_the_failure_is_not_interrupted():
    heard = asyncio.Event()

    class Hearing(FakeTrainer):
        async def send_weights(self, manifest, timeout_s):
            if not self.sent:
                self.outcomes.append(WeightTransferError("receiver 1 is gone"))
                asyncio.get_running_loop().call_later(0.01, heard.set)
                await heard.wait()
            return await super().send_weights(manifest, timeout_s)

    good = FakeReplica(TransferEnded("the sender ended it"))
    made, trainer, _ = engine(good, FakeReplica(ProcessDied("gone")), trainer=Hearing(), own={"blame_s": 4})
    await asyncio.wait_for(made.publish(4), 3)
    assert (good.committed, trainer.interrupted.is_set(), trainer.opened) == ([4], False, [2, 1])


async def test_where_ranks_are_on_several_nodes_each_replica_receives_from_the_rank_on_its_own():
    seen = {}

    class Where(FakeReplica):
        async def receive_weights(self, manifest, source, timeout_s):
            seen[id(self)] = source.epoch, source.receiver
            return await super().receive_weights(manifest, source, timeout_s)

    replicas = [Where() for _ in range(4)]
    nodes = Machines(("a", "a", "b", "b"), {0: "b", 1: "a", 2: "b", 3: "lost"})
    made, trainer, _ = engine(*replicas, own={"machines": lambda: nodes, "receivers_per_replica": 2})
    await made.publish(4)
    assert [seen[id(replica)] for replica in replicas] == [(2, 0), (0, 0), (2, 2), (0, 2)]  # rank, receiver
    assert trainer.opened == [8]


async def test_getting_ready_to_send_has_what_is_left_of_the_publish():
    class Slow(FakeTrainer):
        async def weight_specs(self, timeout_s):
            await asyncio.sleep(0.02)
            return await super().weight_specs(timeout_s)

    made, trainer, _ = engine(FakeReplica(), FakeReplica(WRONG), trainer=Slow(), publish_timeout_s=40)
    await made.publish(1)
    assert [name for name, _ in trainer.timeouts] == ["weight_specs", "open_weights", "open_weights"]
    specs_s, first_s, second_s = (timeout_s for _, timeout_s in trainer.timeouts)
    assert 30 < second_s < first_s <= specs_s - 0.02 < 40


async def test_a_replacement_that_a_publish_waited_for_is_verified():
    class Later(FakeFleet):
        async def wait_member(self, timeout_s):
            self._replicas[0] = FakeReplica()

    first = FakeReplica()
    fleet = Later(first)
    made, _, _ = engine(fleet=fleet, verify="first", verify_every=100)
    await made.publish(0)
    first.pause_error = ProcessDied("gone")
    report = await made.publish(1)
    assert (report.verified, fleet.members[0].committed) == (True, [1])


async def test_one_that_is_late_alone_while_the_others_serve_is_replaced():
    class LateTwice(FakeReplica):
        async def pause(self, mode):
            if self.calls:
                raise DeadlineExceeded("no answer")
            await super().pause(mode)

    made, _, fleet = engine(FakeReplica(), LateTwice(WRONG))
    report = await made.publish(1)
    assert report.replicas == 1
    assert [i for i, _ in fleet.failures] == [1]


@pytest.mark.parametrize(("interrupt", "share_s"), [("abort_resume", 12), ("drain", 28)])
async def test_a_pause_leaves_time_for_a_transfer_to_the_others(interrupt, share_s):
    limits = []

    class Asked(FakeReplica):
        async def call(self, timeout_s, method, *args):
            if method is Replica.pause:
                limits.append(timeout_s)
            return await super().call(timeout_s, method, *args)

    made, _, fleet = engine(
        Asked(),
        Asked(pause_error=DeadlineExceeded("late")),
        own={"interrupt": interrupt},
        transfer_timeout_s=12,
        publish_timeout_s=40,
    )
    assert (await made.publish(1)).replicas == 1
    assert limits == [pytest.approx(share_s, abs=0.5)] * 2
    assert [i for i, _ in fleet.failures] == [1]


@pytest.mark.parametrize("where", ["pause_error", "commit_error"])
async def test_a_single_replica_that_answers_nothing_is_taken_out_and_who_comes_after_it_gets_the_weights(where):
    late, fresh = DeadlineExceeded("no answer within 1 s"), FakeReplica()
    stopped = FakeReplica(**{where: late})
    stopped.alive = False
    made, _, fleet = engine(stopped, respawn=lambda i: fresh)
    assert (await made.publish(5)).replicas == 1
    assert (stopped.committed, fresh.committed) == ([], [5])
    assert [i for i, _ in fleet.failures] == [0]


async def test_a_sender_is_interrupted_at_once_for_a_receiver_that_the_fleet_found_late():
    class Stopped(FakeReplica):
        async def receive_weights(self, manifest, source, timeout_s):
            fleet.fail(1, self, "it answers no health check")
            raise DeadlineExceeded("it answers too late")

    good = FakeReplica(TransferEnded("the sender ended it"))
    made, trainer, fleet = engine(
        good, Stopped(), trainer=FakeTrainer(waits=True), own={"blame_s": 60}, transfer_timeout_s=60
    )
    report = await asyncio.wait_for(made.publish(4), 4)
    assert (trainer.interrupted.is_set(), report.replicas, good.committed) == (True, 1, [4])


# -- rolling -----------------------------------------------------------------------------------------------------------


ROLLING = {"rolling": True}


async def served(made, version=0):
    """The first publish; its calls are not on record."""
    await made.publish(version)
    for replica in made._fleet.members.values():
        replica.calls.clear()
    made._fleet.routing.clear()


async def rolling(count=3, **options):
    """An engine of rolling publishes after its first one, its trainer, its fleet and their replicas."""
    replicas = [FakeReplica() for _ in range(count)]
    made, trainer, fleet = engine(*replicas, own=ROLLING, **options)
    await served(made)
    return made, trainer, fleet, replicas


async def test_a_rolling_publish_reaches_some_at_a_time_while_the_others_are_sent_requests():
    replicas = [FakeReplica() for _ in range(5)]
    made, trainer, fleet = engine(*replicas, own=ROLLING, rolling_replicas=2)
    await made.publish(1)
    assert fleet.routing == [("hold", [0, 1, 2, 3, 4], None), ("committed", [0, 1, 2, 3, 4], 1)], (
        "newcomers go together"
    )
    await served(made, 2)
    report = await made.publish(3)
    waves = [call[1] for call in fleet.routing if call[0] == "hold"]
    assert [call[1] for call in fleet.routing if call[0] == "committed"] == waves
    assert {call[2] for call in fleet.routing if call[0] == "committed"} == {3}
    assert sorted(i for wave in waves for i in wave) == [0, 1, 2, 3, 4]
    assert [len(wave) for wave in waves] == [2, 2, 1]
    assert [call[0] for call in fleet.routing] == ["hold", "committed"] * 3
    assert (report.attempts, report.replicas, trainer.opened[0]) == (3, 5, 5)
    assert all(r.committed == [3] for r in replicas)
    assert report.pause_s < report.publish_s / 2, "at most two of five stand still at any time"


async def test_without_rolling_the_rollout_side_is_told_nothing():
    made, _, fleet = engine(FakeReplica(), FakeReplica(), rolling_replicas=1)
    for version in (1, 2):
        assert (await made.publish(version)).attempts == 1
    assert fleet.routing == []


async def test_the_next_rolling_publish_begins_where_the_sending_end_is_open():
    made, trainer, fleet, _ = await rolling(2)
    for version in (1, 2, 3):
        await made.publish(version)
    assert [call[1] for call in fleet.routing if call[0] == "hold"] == [[0], [1], [1], [0], [0], [1]]
    assert trainer.opened == [2, 1, 1, 1, 1], "once for each publish after the first"


async def test_a_rolling_publish_to_one_replica_is_a_publish():
    replica = FakeReplica()
    made, trainer, fleet = engine(replica, own=ROLLING)
    for version in (1, 2):
        report = await made.publish(version)
        assert (report.attempts, report.replicas) == (1, 1)
    assert replica.committed == [1, 2]
    assert trainer.opened == [1]
    assert fleet.newcomers == {}


async def test_newcomers_go_with_the_first_wave():
    made, _, fleet, replicas = await rolling(respawn=lambda i: FakeReplica())
    fleet.fail(2, replicas[2], "killed")
    await made.publish(1)
    assert [call[1] for call in fleet.routing if call[0] == "hold"] == [[0, 2], [1]]
    fleet.fail(2, fleet.members[2], "killed again")
    fleet.routing.clear()
    assert (await made.publish(1, newcomers_only=True)).replicas == 1
    assert fleet.routing == [("hold", [2], None), ("committed", [2], 1)]


@pytest.mark.parametrize("error", [ProcessDied("gone"), DeadlineExceeded("no answer within 1 s")])
async def test_a_wave_that_loses_its_replica_is_followed_by_the_others(error):
    made, _, fleet, replicas = await rolling()
    replicas[1].pause_error = error
    replicas[1].alive = False
    assert (await made.publish(1)).replicas == 2
    assert [r.committed for r in replicas] == [[1], [], [1]]
    assert [i for i, _ in fleet.failures] == [1]
    assert ("committed", [1], 1) not in fleet.routing


async def test_one_that_got_wrong_bytes_is_sent_them_again_before_others_are_held_up():
    made, _, fleet, replicas = await rolling(verify="always", max_retries=1)
    replicas[0].outcomes.append(WRONG)
    assert (await made.publish(1)).attempts == 4
    assert [call[:2] for call in fleet.routing] == [
        ("hold", [0]),
        *((call, [i]) for i in (0, 1, 2) for call in ("hold", "committed")),
    ]


async def test_one_that_is_paused_goes_before_others_also_when_the_sending_end_had_to_be_closed():
    made, trainer, fleet, replicas = await rolling(max_retries=1)
    await made.publish(1)
    fleet.routing.clear()
    replicas[2].outcomes.append(ValueError("what is this?"))
    trainer.waits = True
    await made.publish(2)
    assert [call[1] for call in fleet.routing if call[0] == "hold"] == [[2], [2], [0], [1]]


async def test_a_rolling_publish_that_fails_leaves_the_others_as_they_were():
    made, trainer, fleet, replicas = await rolling()
    trainer.outcomes = [(1, 2), WeightTransferError("publish tensor 3: the weights ended before it")]
    with pytest.raises(WeightTransferError, match="tensor 3"):
        await made.publish(1)
    assert [r.committed for r in replicas] == [[1], [], []]
    assert fleet.routing[-1] == ("hold", [1], None), "nothing is sent to its closed gate until the next publish"
    assert (await made.publish(1)).replicas == 3


async def test_the_deadline_of_a_rolling_publish_is_for_all_waves():
    made, _, _ = engine(*(Slow() for _ in range(20)), own=ROLLING, publish_timeout_s=0.1)
    await served(made)
    with pytest.raises(DeadlineExceeded, match=r"(?s)within 0\.1 s.*after [1-9] transfer"):
        await made.publish(1)


# -- staged ------------------------------------------------------------------------------------------------------------


async def test_a_staged_publish_sends_first_and_then_each_replica_adopts_by_itself():
    replicas = FakeReplica(), FakeReplica()
    made, trainer, fleet = engine(*replicas, stage=True)
    report = await made.publish(7)
    for i, replica in enumerate(replicas):
        assert replica.calls == [("receive", 1, i), ("adopt", 1, 7, (1, 2), "abort")]
    assert [m.is_staged for m in trainer.sent] == [True]
    assert (report.version, report.verified, report.replicas, report.pause_s) == (7, True, 2, 0.25)
    assert fleet.newcomers == {}


async def test_wrong_bytes_that_were_staged_stop_nobody_and_are_sent_again():
    good, bad = FakeReplica(), FakeReplica(WRONG)
    made, _, fleet = engine(good, bad, stage=True, max_retries=1)
    report = await made.publish(3)
    assert good.calls == [("receive", 1, 0), ("adopt", 1, 3, (1, 2), "abort")]
    assert bad.calls == [("receive", 1, 1), ("receive", 2, 0), ("adopt", 2, 3, (1, 2), "abort")]
    assert (report.attempts, report.replicas, fleet.failures) == (2, 2, [])


class Refuses(FakeReplica):
    """Cannot load what it has staged, so many times."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    async def adopt(self, *args):
        self.times -= 1
        if self.times >= 0:
            raise WeightTransferError("tensor norm.weight does not fit")
        return await super().adopt(*args)


async def test_staged_weights_that_cannot_be_loaded_are_sent_again():
    once = Refuses(1)
    made, _, fleet = engine(FakeReplica(), once, stage=True, max_retries=1)
    report = await made.publish(3)
    assert (report.attempts, report.replicas, once.committed, fleet.failures) == (2, 2, [3], [])


@pytest.mark.parametrize(("bad", "stage"), [(lambda: FakeReplica(WRONG), False), (lambda: Refuses(1), True)])
async def test_when_the_replacement_is_wrong_too_the_run_stops_with_the_name_of_the_tensor(bad, stage):
    """Also where it cannot load what it has staged."""
    made, _, fleet = engine(FakeReplica(), bad(), stage=stage, max_retries=0, verify="always", respawn=lambda i: bad())
    await made.publish(3)
    with pytest.raises(WeightTransferError, match=r"(?s)version 4.*replica 1.*norm\.weight"):
        await made.publish(4)
    assert len(fleet.failures) == 1


async def test_differences_that_cannot_be_loaded_are_followed_by_all_weights_without_a_strike():
    replica = Refuses(0)
    made, trainer, fleet = engine(replica, stage=True, own={"encoding": "delta"}, max_retries=0)
    await made.publish(1)
    replica.times = 1
    report = await made.publish(2)
    assert [m.encoding for m in trainer.sent] == ["full", "delta", "full"]
    assert (report.attempts, replica.committed, fleet.failures) == (2, [1, 2], [])


async def test_a_rolling_publish_that_is_staged_sends_no_request_elsewhere_before_the_weights_have_come():
    class Watched(FakeReplica):
        async def receive_weights(self, manifest, source, timeout_s):
            seen.append([call[0] for call in fleet.routing])
            return await super().receive_weights(manifest, source, timeout_s)

    seen = []
    made, _, fleet = engine(Watched(), Watched(), own=ROLLING, stage=True)
    await served(made)
    seen.clear()
    await made.publish(1)
    assert seen == [[], ["hold", "committed"]]
    assert [call[0] for call in fleet.routing] == ["hold", "committed"] * 2
