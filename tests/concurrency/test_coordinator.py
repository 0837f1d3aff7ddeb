"""The coordinator over scripted parts: who is published to while it waits, and what ends a wait.

The checkpoint engine, the logs and the checkpoint store are real; trainer, replicas, queue and rollouter are scripted.
"""

import asyncio
import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.driver import coordinator, evaluation_schedule
from asyncrl.driver.coordinator import Coordinator
from asyncrl.driver.interfaces import Parts
from asyncrl.driver.publish.checkpoint_engine import CheckpointEngine
from asyncrl.errors import DeadlineExceeded, GenerationError, NoParity, ProcessDied, RunFailed, StorageError
from asyncrl.observability.events import EventLog
from asyncrl.observability.metrics_log import MetricsLog
from asyncrl.observability.progress import ProgressView
from asyncrl.trainer.planner import StepPlanner
from asyncrl.types import (
    Committed,
    EvalResult,
    GroupSummary,
    LeaseManifest,
    LeaseWait,
    LedgerCounts,
    Lengths,
    RolloutStats,
    TrainMetrics,
)
from asyncrl_testing.fake_fleet import FakeFleet, FakeReplica, FakeTrainer
from asyncrl_testing.local import LocalActor
from tests.make import quickstart, trajectory
from tests.waiting import until

GROUP = GroupSummary(0, 0, (Lengths(3, 2, 2),) * 2, (0.0, 1.0), (), 2, 0)
TRAINED = TrainMetrics(
    0.1,
    1.0,
    1e-3,
    1.0,
    4,
    10,
    tuple(
        (f"train/{n}", 0.5)
        for n in (
            "clip_fraction",
            "clip_fraction_positive",
            "clip_fraction_negative",
            "ratio_mean",
            "kl_behavior",
            "effective_samples",
            "ratio_tails",
            "entropy",
        )
    ),
)


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch):
    for module in (coordinator, evaluation_schedule):
        monkeypatch.setattr(module, "POLL_S", 0.005)


async def _set_within(event, wait_s):
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True


class Part:
    async def save(self, where, timeout_s=None):
        where.mkdir(parents=True)
        (where / "state").write_text("state")
        return {}

    async def ping(self, timeout_s=None):
        return 0.25


class Queue(Part):
    """Has the groups of a step at once, or when it was held and `ready[step]` is set; none runs while `idle` is set.
    `limits`: on the lag, each with the number of publishes before it."""

    def __init__(self):
        self.limits = []
        self.ready, self.idle = {}, asyncio.Event()
        self.idle.set()
        self.published_versions, self.committed, self.leases, self.waits = [], [], 0, 0
        self.foreseen, self.stored = (), []

    async def some_ready(self, count):
        return self.stored[:count]

    def hold(self, step):
        self.ready[step] = asyncio.Event()

    async def foresee(self, step, wait_s):
        ready = step not in self.ready or await _set_within(self.ready[step], wait_s)
        return (self.foreseen or (GROUP,)) if ready else ()

    async def lease(self, step, wait_s):
        self.leases += 1
        if step in self.ready and not await _set_within(self.ready[step], wait_s):
            return LeaseWait(1, 0, LedgerCounts())
        return LeaseManifest(step, (GROUP,))

    async def commit(self, step, *, leases_next=False):
        self.committed.append(step)
        is_ready = step + 1 not in self.ready or self.ready[step + 1].is_set()
        return Committed(lease=LeaseManifest(step + 1, (GROUP,)) if leases_next and is_ready else None)

    async def published(self, version):
        self.published_versions.append(version)
        return LedgerCounts()

    async def limit_lag(self, limit):
        self.limits.append((limit, len(self.published_versions)))
        return LedgerCounts(expired=3)

    async def load(self, directory):
        return LedgerCounts(trained=16 * json.loads((directory.parent / "state.json").read_text())["global_steps"])

    async def wait_idle(self, wait_s):
        self.waits += 1
        return await _set_within(self.idle, wait_s)

    async def capture(self, partials):
        self.captured = len(self.committed)
        return LedgerCounts()


class Trainers(Part):
    """`on_step[i]`: awaited within step i. `snapshots`: number of them."""

    def __init__(self):
        self.on_step, self.snapshots, self.ahead, self.plans = {}, 0, [], []

    async def snapshot_weights(self):
        self.snapshots += 1

    async def logprobs(self, sequences):
        return [sequence.logprobs for sequence in sequences]

    async def fetch_ahead(self, plans):
        self.ahead.append(plans[0].step)

    async def train_step(self, plans):
        self.plans += plans
        if hook := self.on_step.get(plans[0].step):
            await hook()
        return TRAINED

    async def capture(self): ...

    async def load(self, directory): ...


class Rollouter:
    """`on_evaluate`: awaited by the evaluations, by turn. `routed`: the replicas that it sends requests to."""

    def __init__(self):
        self.on_evaluate, self.evaluations, self.routed, self.lent = [], 0, (0, 1), []
        self.apart, self.scored = 0.0, 0

    async def score(self, sequences, timeout_s):
        self.scored += len(sequences)
        return [sequence.logprobs + np.float32(self.apart) for sequence in sequences]

    async def run(self):
        await asyncio.Event().wait()

    async def evaluate(self, name, seed, timeout_s, leased=None):
        self.evaluations += 1
        if self.on_evaluate:
            await self.on_evaluate.pop(0)()
        return EvalResult(name, 0.5, 0.5, 4.0, 10, 0)

    async def stats(self, timeout_s):
        return RolloutStats(1, 0, 0, self.routed, 0.75)

    async def partials(self, timeout_s):
        return []


class Fleet(FakeFleet):
    """`looks`: how often it was asked for newcomers. `lost`: a result makes the watch raise it."""

    def __init__(self, count):
        super().__init__(*(FakeReplica() for _ in range(count)), respawn=lambda i: FakeReplica())
        self.looks = 0
        self.lost = asyncio.get_running_loop().create_future()

    @property
    def newcomers(self):
        self.looks += 1
        return super().newcomers

    @property
    def serving(self):
        return {i: r for i, r in self.members.items() if self._serving.get(i) is r}

    def kill(self, *replica_ids):
        for i in replica_ids:
            self.fail(i, self.members[i], "killed")

    async def looked(self, times=3):
        """Returns when it was asked for newcomers so many times more: so many polls have passed."""
        wanted = self.looks + times
        await until(lambda: self.looks >= wanted)

    def versions(self):
        return {i: replica.committed for i, replica in self.members.items()}

    async def stats(self):
        await super().stats()
        return []

    async def watch(self):
        raise await asyncio.shield(self.lost)


def parts_of(rig, replicas, log, *, interrupt="abort_resume", engines=None, **times):
    """The scripted parts of a rig, and real ones around them."""
    return Parts(
        queue=LocalActor(rig.queue),
        trainers=rig.trainers,
        rollouter=rig.rollouter,
        replicas=replicas,
        weights=CheckpointEngine(rig.recipe.weights, rig.trainer, replicas, interrupt=interrupt, **times),
        checkpoints=CheckpointStore(rig.path / "checkpoints", keep=2),
        metrics=MetricsLog(rig.path / "metrics.jsonl"),
        events=log,
        progress=ProgressView(Console(quiet=True), max_steps=rig.recipe.run.max_steps, live=False),
        prompts_digest="digest",
        queue_writer="queue",
        engines=engines,
    )


class Written:
    """What the run in directory `path` has written."""

    path: Path

    @property
    def metrics(self):
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, *kinds):
        events = map(json.loads, (self.path / "events.jsonl").read_text().splitlines())
        return [event for event in events if event["event"] in kinds]

    def told(self, *kinds):
        """(kind, version or step) of these events."""
        return [(event["event"], event.get("version", event.get("step"))) for event in self.events(*kinds)]


class Rig(Written):
    """A run of two replicas, without evaluations unless asked for."""

    def __init__(self, tmp_path, *overrides, max_steps=1, start_from=None):
        self.path = tmp_path
        fixed = f"run.max_steps={max_steps}", "ray.health_interval_s=0.005"
        self.recipe = quickstart("eval.every_steps=0", *fixed, *overrides)
        self.queue, self.trainers, self.rollouter = Queue(), Trainers(), Rollouter()
        self.trainer, self.fleet = FakeTrainer(), Fleet(2)
        self.parts = parts_of(self, self.fleet, EventLog(tmp_path / "events.jsonl"))
        self.coordinator = Coordinator(self.recipe, self.parts, start_from)

    def run(self):
        return asyncio.create_task(asyncio.wait_for(self.coordinator.run(), 20))

    def sent(self):
        """The version of every publish, catch-ups among them."""
        return [m.version for m in self.trainer.sent]

    def saved(self):
        return [path.name for path in self.parts.checkpoints.all()]


async def waiting_for_groups(rig, step):
    """The run of `rig`, which waits for the groups of this step until `rig.queue.ready[step]` is set."""
    rig.queue.hold(step)
    running = asyncio.ensure_future(rig.run())
    await until(lambda: rig.queue.leases > step + 1)
    return running


@pytest.mark.parametrize("overlap", ["weights.overlap=true", "weights.overlap=false"])
async def test_a_run_publishes_every_step_and_leaves_a_checkpoint(tmp_path, overlap):
    rig = Rig(tmp_path, overlap, max_steps=3)
    await rig.run()
    assert rig.sent() == rig.queue.published_versions == [0, 1, 2, 3]
    assert rig.fleet.versions() == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert (rig.queue.committed, rig.saved()) == ([0, 1, 2], ["step_3"])


@pytest.mark.parametrize(("minutes", "saved"), [(1e-6, ["step_3", "step_4"]), (60, ["step_4"])])
async def test_a_checkpoint_follows_the_first_step_after_some_minutes(tmp_path, minutes, saved):
    rig = Rig(tmp_path, "checkpoint.every_steps=0", f"checkpoint.every_minutes={minutes}", max_steps=4)
    await rig.run()
    assert rig.saved() == saved, "the last two are kept"


async def test_while_it_waits_for_groups_a_newcomer_alone_gets_the_published_version(tmp_path):
    rig = Rig(tmp_path)
    running = await waiting_for_groups(rig, 0)
    rig.fleet.kill(0)
    await until(lambda: rig.fleet.versions()[0] == [0])
    await rig.fleet.looked()
    assert rig.fleet.versions() == {0: [0], 1: [0]}
    assert (rig.sent(), rig.queue.published_versions) == ([0, 0], [0])
    rig.queue.ready[0].set()
    await running
    assert rig.fleet.versions() == {0: [0, 1], 1: [0, 1]}
    assert [(e["version"], e["replicas"]) for e in rig.events("publish")] == [(0, 2), (0, 1), (1, 2)]


async def test_while_it_waits_with_an_unpublished_step_everybody_gets_the_newer_version(tmp_path):
    rig = Rig(tmp_path, "staleness.publish_every_steps=2", max_steps=3)
    running = await waiting_for_groups(rig, 1)
    assert (rig.coordinator.step, rig.sent()) == (1, [0])
    rig.fleet.kill(0)
    await until(lambda: rig.queue.published_versions == [0, 1])
    await rig.fleet.looked()
    assert rig.fleet.versions() == {0: [1], 1: [0, 1]}
    rig.queue.ready[1].set()
    await running
    assert rig.sent() == rig.queue.published_versions == [0, 1, 2, 3]


async def test_a_drain_that_nobody_can_end_publishes_once(tmp_path):
    rig = Rig(tmp_path, "mode=one_step_off", max_steps=2)

    async def all_die():
        rig.queue.idle.clear()
        rig.fleet.kill(0, 1)

    rig.trainers.on_step[0] = all_die
    running = await waiting_for_groups(rig, 1)
    assert rig.sent() == rig.queue.published_versions == [0, 1]
    assert rig.fleet.versions() == {0: [1], 1: [1]}
    rig.queue.idle.set()
    rig.queue.ready[1].set()
    await running
    assert rig.sent() == rig.queue.published_versions == [0, 1, 2]


async def test_a_drain_that_the_others_can_end_waits_for_them(tmp_path):
    rig = Rig(tmp_path, "mode=one_step_off")

    async def one_dies():
        rig.queue.idle.clear()
        rig.fleet.kill(0)

    rig.trainers.on_step[0] = one_dies
    running = rig.run()
    await until(lambda: rig.queue.waits)
    await rig.fleet.looked()
    assert rig.sent() == [0]
    rig.queue.idle.set()
    await running
    assert rig.fleet.versions() == {0: [1], 1: [0, 1]}


class _Held:
    """Publishes of `version` that wait for `go`."""

    def __init__(self, rig, version, error=None):
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self._send, self._version, self._error = rig.trainer.send_weights, version, error
        rig.trainer.send_weights = self

    async def __call__(self, manifest, timeout_s):
        if manifest.version == self._version:
            self.begun.set()
            await self.go.wait()
            if self._error is not None:
                raise self._error
        return await self._send(manifest, timeout_s)


async def test_a_publish_goes_on_beside_the_next_step_and_ends_before_its_commit(tmp_path):
    rig = Rig(tmp_path, "weights.overlap=true", max_steps=4)
    held = _Held(rig, 1)
    trained, after = asyncio.Event(), asyncio.Event()

    async def two():
        trained.set()

    async def three():
        after.set()

    rig.trainers.on_step = {1: two, 2: three}
    running = rig.run()
    await asyncio.gather(held.begun.wait(), trained.wait())
    for _ in range(20):
        await asyncio.sleep(0)
    assert (rig.queue.committed, rig.queue.published_versions) == ([0], [0]), "step 2 is trained, not committed"
    assert not after.is_set()
    held.go.set()
    await running
    assert rig.sent() == rig.queue.published_versions == [0, 1, 2, 3, 4]
    assert rig.trainers.snapshots == 5
    assert rig.told("publish", "step") == [
        ("publish", 0),
        *((kind, n) for n in (1, 2, 3, 4) for kind in ("step", "publish")),
    ]
    assert [line["weights/replicas"] for line in rig.metrics] == [0, 2, 2, 2], (
        "each line has the publish that ended in it"
    )


async def test_a_publish_beside_training_that_fails_ends_the_run_while_it_waits_for_groups(tmp_path, caplog):
    rig = Rig(tmp_path, "weights.overlap=true", max_steps=4)
    held = _Held(rig, 1, ProcessDied("the sending rank is gone"))
    rig.queue.hold(1)
    running = rig.run()
    await held.begun.wait()
    held.go.set()
    with pytest.raises(ProcessDied, match="sending rank"):
        await running
    assert "also:" not in caplog.text, "it is told once"
    assert (rig.queue.committed, rig.queue.published_versions) == ([0], [0])


async def test_a_stop_while_it_waits_for_groups_lets_a_publish_beside_training_end_and_saves_the_step(tmp_path):
    rig = Rig(tmp_path, "weights.overlap=true", "run.shutdown_timeout_s=0.2", max_steps=4)
    held = _Held(rig, 1)
    running = await waiting_for_groups(rig, 1)
    await held.begun.wait()
    rig.coordinator.stop()
    await asyncio.sleep(0.5)  # longer than a stop may take
    assert not running.done()
    held.go.set()
    await running
    assert rig.saved() == ["step_1"]


async def test_an_error_of_a_publish_beside_training_is_told_when_training_fails_first(tmp_path, caplog):
    rig = Rig(tmp_path, "weights.overlap=true", max_steps=4)
    held = _Held(rig, 1, ProcessDied("the sending rank is gone"))

    async def fails():
        held.go.set()
        await held.begun.wait()
        await asyncio.sleep(0.05)
        raise RunFailed("the loss is not finite")

    rig.trainers.on_step = {1: fails}
    with pytest.raises(RunFailed, match="not finite"):
        await rig.run()
    assert "the sending rank is gone" in caplog.text


async def test_a_newcomer_that_comes_during_a_publish_beside_training_gets_that_version(tmp_path):
    rig = Rig(tmp_path, "weights.overlap=true", max_steps=2)
    held = _Held(rig, 1)
    rig.queue.hold(1)
    running = rig.run()
    await held.begun.wait()
    rig.fleet.kill(0)
    await rig.fleet.looked(1)
    held.go.set()
    await until(lambda: rig.fleet.versions()[0] == [1])
    rig.queue.ready[1].set()
    await running
    assert rig.fleet.versions() == {0: [1, 2], 1: [0, 1, 2]}
    assert rig.queue.published_versions == [0, 1, 2]


async def test_beside_a_publish_the_next_lease_comes_with_the_commit_and_metrics_are_written_while_it_trains(tmp_path):
    rig = Rig(tmp_path, "weights.overlap=true", "checkpoint.every_steps=3", max_steps=6)
    lines = []

    async def count():
        await until(lambda: len(rig.metrics) == len(lines) + 1)  # the line of the step before
        lines.append(1)

    rig.trainers.on_step = {1: count, 2: count}
    await rig.run()
    assert len(lines) == 2
    assert [line["step"] for line in rig.metrics] == [1, 2, 3, 4, 5, 6]
    assert rig.queue.leases == 2, "of the first step, and of the one after the checkpoint"
    assert (rig.queue.committed, rig.sent()) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6])
    assert rig.saved() == ["step_3", "step_6"]


@pytest.mark.parametrize("is_right", [True, False])
async def test_the_next_step_is_planned_and_fetched_while_one_trains(tmp_path, is_right, monkeypatch):
    rig = Rig(tmp_path, max_steps=3)
    rig.queue.foreseen = () if is_right else (dataclasses.replace(GROUP, ordinal=7),)
    planned, plan = [], StepPlanner.plan

    def counted(self, manifest, *args, **options):
        planned.append(manifest.step)
        return plan(self, manifest, *args, **options)

    monkeypatch.setattr(StepPlanner, "plan", counted)

    def foreseen(step):
        async def hook():
            await until(lambda: step in rig.trainers.ahead)

        return hook

    rig.trainers.on_step = {0: foreseen(1), 1: foreseen(2)}
    await rig.run()
    assert rig.trainers.ahead == [1, 2], "the last step has no successor"
    assert planned == ([0, 1, 2] if is_right else [0, 1, 1, 2, 2]), "the lease decides"
    assert {s.ordinal for p in rig.trainers.plans for m in p.microbatches for s in m} == {0}
    assert [plan.step for plan in rig.trainers.plans] == rig.queue.committed == [0, 1, 2], "parts count from 0"
    assert [line["step"] for line in rig.metrics] == [event["step"] for event in rig.events("step")] == [1, 2, 3]


async def test_a_rank_that_dies_while_it_fetches_ahead_ends_the_step_with_its_error(tmp_path):
    rig, tried = Rig(tmp_path, max_steps=3), asyncio.Event()

    async def dies(plans):
        tried.set()
        raise ProcessDied("rank 0 is gone")

    rig.trainers.fetch_ahead, rig.trainers.on_step = dies, {0: tried.wait}
    with pytest.raises(ProcessDied, match="rank 0"):
        await rig.run()
    assert rig.queue.committed == []


async def test_groups_that_are_not_ready_in_time_are_not_waited_for(tmp_path):
    rig = Rig(tmp_path, max_steps=2)
    running = await waiting_for_groups(rig, 1)
    assert (rig.queue.committed, rig.trainers.ahead) == ([0], [])
    rig.queue.ready[1].set()
    await running


async def test_a_stop_after_the_next_lease_has_come_trains_that_step(tmp_path):
    rig = Rig(tmp_path, "weights.overlap=true", max_steps=9)
    commit = rig.queue.commit

    async def stopped(step, *, leases_next=False):
        found = await commit(step, leases_next=leases_next)
        rig.coordinator.stop()
        return found

    rig.queue.commit = stopped
    await rig.run()
    assert (rig.queue.committed, rig.saved()) == ([0, 1], ["step_2"])
    assert [line["step"] for line in rig.metrics] == [1, 2]


@pytest.mark.parametrize(
    ("fails", "error", "match"), [(False, StorageError, "no space"), (True, RunFailed, "not finite")]
)
async def test_metrics_that_cannot_be_written_beside_training_end_the_run_or_are_told_when_it_fails_first(
    tmp_path, monkeypatch, caplog, fails, error, match
):
    rig, tried = Rig(tmp_path, "weights.overlap=true", max_steps=9), []

    async def train():
        await until(lambda: tried)
        if fails:
            raise RunFailed("the loss is not finite")

    def full(self, record):
        tried.append(record)
        raise StorageError("no space left")

    monkeypatch.setattr(MetricsLog, "write", full)
    rig.trainers.on_step = {1: train}
    with pytest.raises(error, match=match):
        await rig.run()
    assert rig.queue.committed == [0], "the step that trained meanwhile is not committed"
    assert not fails or "no space left" in caplog.text


async def test_the_metrics_of_a_committed_step_are_written_when_the_next_one_fails(tmp_path):
    rig, asked = Rig(tmp_path, "weights.overlap=true", max_steps=9), asyncio.Event()

    async def slow():
        asked.set()
        await asyncio.sleep(0.1)
        return []

    async def fails():
        rig.fleet.stats = slow
        await asked.wait()
        raise RunFailed("the loss is not finite")

    rig.trainers.on_step = {1: fails}
    with pytest.raises(RunFailed, match="not finite"):
        await rig.run()
    assert [line["step"] for line in rig.metrics] == [1]


@pytest.mark.parametrize("watches", ["staleness.guard=watch", "eval.every_steps=1"])
async def test_what_looks_at_a_step_looks_before_the_next_lease(tmp_path, watches):
    rig = Rig(tmp_path, "weights.overlap=true", watches, max_steps=3)
    await rig.run()
    assert rig.queue.leases == 3


@pytest.mark.parametrize("every", ["checkpoint.every_steps=1", "eval.every_steps=1"])
async def test_a_checkpoint_and_an_evaluation_wait_for_the_publish_beside_training(tmp_path, every):
    rig = Rig(tmp_path, "weights.overlap=true", every, max_steps=2)
    held = _Held(rig, 1)
    running = rig.run()
    await held.begun.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert (rig.saved(), rig.rollouter.evaluations) == ([], int(every.startswith("eval")))
    held.go.set()
    await running
    assert rig.saved() == (["step_1", "step_2"] if every.startswith("checkpoint") else ["step_2"])
    assert [(e["step"], e["version"]) for e in rig.events("evaluation")] in ([], [(0, 0), (1, 1), (2, 2)])


async def test_a_rolling_publish_sends_a_copy_also_where_training_waits_for_it(tmp_path):
    """Each wave would gather the weights again."""
    rig = Rig(tmp_path, "weights.overlap=false", "weights.rolling=true", max_steps=2)
    await rig.run()
    assert rig.recipe.sends_snapshots
    assert rig.trainers.snapshots == len(rig.queue.published_versions) == 3


EVALUATED = ("eval.every_steps=1", "staleness.publish_every_steps=2")


async def _nothing(): ...


async def test_an_evaluation_that_nobody_can_answer_gets_the_weights_that_there_are(tmp_path):
    rig = Rig(tmp_path, *EVALUATED, max_steps=2)

    async def all_die():
        assert rig.sent() == [0], "step 1 is not published"
        rig.fleet.kill(0, 1)
        await until(lambda: rig.fleet.serving)

    rig.rollouter.on_evaluate = [_nothing, all_die]
    await rig.run()
    assert rig.sent() == rig.queue.published_versions == [0, 1, 2]
    assert [(e["step"], e["version"]) for e in rig.events("evaluation")] == [(0, 0), (1, 1), (2, 2)]


async def test_an_evaluation_that_others_answer_sees_one_version(tmp_path):
    rig = Rig(tmp_path, *EVALUATED, max_steps=2)
    seen = []

    async def one_dies():
        rig.fleet.kill(0)
        await rig.fleet.looked()
        seen.append(rig.fleet.versions())

    rig.rollouter.on_evaluate = [_nothing, one_dies]
    await rig.run()
    assert seen == [{0: [], 1: [0]}]
    assert rig.fleet.versions() == {0: [2], 1: [0, 2]}


async def test_during_an_evaluation_of_the_published_version_a_newcomer_gets_it(tmp_path):
    rig = Rig(tmp_path, *EVALUATED)

    async def one_dies():
        rig.fleet.kill(0)
        await until(lambda: rig.fleet.versions()[0])

    rig.rollouter.on_evaluate = [one_dies]
    await rig.run()
    assert rig.fleet.versions() == {0: [0, 1], 1: [0, 1]}
    assert [(e["version"], e["replicas"]) for e in rig.events("publish")] == [(0, 2), (0, 1), (1, 2)]


@pytest.mark.parametrize("overlaps", [False, True])
async def test_the_guard_lowers_the_limit_after_a_publish_and_ends_the_run_with_a_checkpoint(tmp_path, overlaps):
    """The scripted trainer is always far off-policy: half of its tokens are in the tails of the ratio."""
    rules = "staleness.guard_rules.trip_steps=1", "staleness.guard_rules.stop_steps=2"
    guarded = "staleness.guard=act", "staleness.max_lag=8", f"weights.overlap={overlaps}", *rules
    rig = Rig(tmp_path, *guarded, max_steps=9)
    with pytest.raises(RunFailed, match=r"after step 3: tokens in the tails of the ratio 0\.50"):
        await rig.run()
    assert (rig.queue.limits, rig.saved()) == ([(1, 1 if overlaps else 2)], ["step_3"])
    assert [(e["step"], e["action"], e["acted"]) for e in rig.events("guard_changed")] == [
        *((1, "tightened", True), (3, "stopped", True)),
    ]
    assert [(line["guard/limit"], line["guard/state"], line["queue/expired"]) for line in rig.metrics] == [
        *((1, 1, 3), (1, 1, 0), (1, 3, 0)),
    ]
    # It goes on with the limit that it had, before anything is published.
    again = Rig(tmp_path, *guarded, max_steps=4, start_from=tmp_path / "checkpoints" / "step_3")
    await again.run()
    assert (again.queue.limits, again.saved()) == ([(1, 0)], ["step_3", "step_4"])


@pytest.mark.parametrize(
    ("overrides", "apart", "ends"),
    [
        ((), 0.0, True),
        ((), 0.4, False),
        (("staleness.parity=warn",), 0.4, True),
        (("weights.stage=false",), 1e-4, True),
    ],
)
async def test_a_resumed_run_compares_stored_responses_before_it_trains(tmp_path, overrides, apart, ends):
    """In mode one_step_off every later token has lag 1."""
    keys = ("mode=one_step_off", *overrides)
    await Rig(tmp_path, *keys, max_steps=2).run()
    again = Rig(tmp_path, *keys, max_steps=3, start_from=tmp_path / "checkpoints" / "step_2")
    silent = trajectory(seed=9)
    again.queue.stored = [replace(silent, loss_mask=~silent.loss_mask), *(trajectory(seed=seed) for seed in range(5))]
    again.rollouter.apart = apart
    if ends:
        await again.run()
    else:
        with pytest.raises(NoParity, match=r"(?s)in step 2, .*differ by 0\.4 nats.*tied embeddings"):
            await again.run()
    assert again.rollouter.scored == coordinator.COMPARED
    assert again.queue.committed == ([2] if ends else [])


async def test_a_resumed_run_that_cannot_compare_trains_on(tmp_path, caplog):
    await Rig(tmp_path, max_steps=1).run()
    again = Rig(tmp_path, max_steps=2, start_from=tmp_path / "checkpoints" / "step_1")
    again.queue.stored = [trajectory()]

    async def dies(sequences, timeout_s):
        raise GenerationError("every replica is lost")

    again.rollouter.score = dies
    await again.run()
    assert "were not compared after the resume: every replica is lost" in caplog.text


@pytest.mark.parametrize("where", ["groups", "drain", "evaluation", "training"])
async def test_replicas_that_cannot_be_replaced_end_the_run_with_their_error(tmp_path, where):
    rig = await _waiting(tmp_path, where)
    rig.fleet.lost.set_result(RunFailed("replica 1 failed after 3 replacement(s)"))
    with pytest.raises(RunFailed, match="after 3 replacement"):
        await rig.running


@pytest.mark.parametrize("part", ["queue", "trainers", "rollouter"])
async def test_a_part_that_answers_no_health_check_ends_the_run_with_its_error(tmp_path, part):
    rig = await _waiting(tmp_path, "groups")

    async def dead(timeout_s=None):
        raise ProcessDied(f"{part} is gone")

    setattr(getattr(rig, part), "stats" if part == "rollouter" else "ping", dead)
    with pytest.raises(ProcessDied, match=part):
        await rig.running


@pytest.mark.parametrize("where", ["groups", "first evaluation", "drain", "evaluation"])
async def test_a_stop_ends_every_wait_and_leaves_a_checkpoint(tmp_path, where):
    rig = await _waiting(tmp_path, where)
    rig.coordinator.stop()
    await rig.running
    assert rig.saved() == ["step_1" if where in ("drain", "evaluation") else "step_0"]
    assert rig.sent() == ([0, 1] if where == "evaluation" else [0])


async def test_a_step_that_does_not_end_after_a_stop_is_told(tmp_path):
    rig = await _waiting(tmp_path, "training")
    rig.coordinator.stop()
    with pytest.raises(DeadlineExceeded, match="stop after step 1"):
        await rig.running
    assert rig.saved() == []


async def _waiting(tmp_path, where):
    """A run of one step that waits there, and would for ever."""
    evaluated = "evaluation" in where
    rig = Rig(
        tmp_path,
        "mode=one_step_off",
        f"eval.every_steps={int(evaluated)}",
        f"run.shutdown_timeout_s={0.05 if where == 'training' else 15}",
    )
    reached = asyncio.Event()

    async def endless():
        reached.set()
        await asyncio.Event().wait()

    if where == "training":
        rig.trainers.on_step[0] = endless
    elif where == "groups":
        rig.queue.hold(0)
    elif where == "drain":
        rig.queue.idle.clear()
    else:
        rig.rollouter.on_evaluate = [endless] if where == "first evaluation" else [_nothing, endless]
    rig.running = rig.run()
    await until(lambda: reached.is_set() or (rig.queue.leases > 1 if where == "groups" else rig.queue.waits > 1))
    return rig
