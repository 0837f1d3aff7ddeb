"""Evaluations beside training: a real pool, checkpoint engine and coordinator over scripted processes."""

import asyncio
from types import SimpleNamespace

import pytest

from asyncrl.driver.coordinator import Coordinator
from asyncrl.driver.fleet.replica_pool import PoolSettings, ReplicaPool
from asyncrl.errors import DeadlineExceeded, GenerationError, Process, ProcessDied
from asyncrl.observability.events import EventLog
from asyncrl.types import EvalResult
from asyncrl_testing.fake_fleet import FakeReplica, FakeTrainer
from tests.concurrency.test_coordinator import Queue, Rollouter, Trainers, Written, parts_of
from tests.concurrency.test_coordinator import _short_polls as _short_polls
from tests.make import quickstart
from tests.waiting import until


class Control(FakeReplica):
    """A process of a replica: it answers until `dead`."""

    dead = None

    def __init__(self, may_start):
        super().__init__()
        self.may_start = may_start

    async def placed(self, timeout_s): ...

    async def start(self):
        await self.may_start.wait()

    async def stats(self):
        if self.dead:
            raise self.dead
        health = SimpleNamespace(busy_s=0.0, generated_tokens=0, version=0, preemptions=None, decode_steps=None)
        return SimpleNamespace(replica_id=0, pid=1, health=health, cpu_s=0.0, external_tokens=0, must_leave=False)

    async def reset(self, timeout_s, incarnation):
        self.calls.append(("reset",))
        if self.dead:
            raise self.dead

    async def stop(self): ...

    def kill(self): ...


class Evaluating(Rollouter):
    """`on_evaluate`: awaited with the lent controls, by turn; what it returns is the version of the tokens. `routed`
    follows the table of the pool."""

    def __init__(self):
        super().__init__()
        self.routed = ()
        self.asked = []

    async def evaluate(self, name, seed, timeout_s, leased=None):
        replicas = None if leased is None else {i: row.handle for i, row in leased.rows.items()}
        self.asked.append((name, None if replicas is None else sorted(replicas)))
        version = await self.on_evaluate.pop(0)(replicas) if self.on_evaluate else None
        versions = () if version is None else (version,)
        return EvalResult(name, 0.5, 0.5, 4.0, 10, 0, interval=(0.2, 0.8), versions=versions)


class Rig(Written):
    """A run of `num` replicas that evaluates on one of them after every second step."""

    def __init__(self, tmp_path, *overrides, num=2, max_steps=6):
        self.path = tmp_path
        keys = ["eval.every_steps=2", "eval.leased_replicas=1", f"rollout.num_replicas={num}"]
        keys += [f"run.max_steps={max_steps}", "ray.health_interval_s=0.005", *overrides]
        self.recipe = quickstart(*keys)
        self.queue, self.trainers, self.rollouter = Queue(), Trainers(), Evaluating()
        self.trainer, self.controls = FakeTrainer(), []
        self.tables = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.log = EventLog(tmp_path / "events.jsonl")
        self.pool = ReplicaPool(
            self._spawn,
            num,
            PoolSettings(5, start_timeout_s=5, health_interval_s=0.005, health_timeout_s=1, restart_delay_s=0),
            on_event=self.log.write,
        )

    def _spawn(self, replica_id):
        self.controls.append(Control(self.may_start))
        return self.controls[-1]

    async def _route(self, table):
        self.rollouter.routed = tuple(table.those("serving", "held"))
        self.tables.append(table)

    async def start(self, *evaluations):
        """Begins the run; `evaluations`: what the rollouter does, by turn."""
        self.rollouter.on_evaluate = [*evaluations]
        await self.pool.set_listener(self._route)
        await self.pool.start()
        self.coordinator = Coordinator(self.recipe, parts_of(self, self.pool, self.log), None)
        self.running = asyncio.create_task(asyncio.wait_for(self.coordinator.run(), 60))
        return self

    def evaluated(self):
        """step -> (version, accuracy) of the lines that carry an evaluation."""
        return {m["step"]: (m["eval/version"], m["eval/accuracy"]) for m in self.metrics if "eval/accuracy" in m}

    async def stepped(self, step):
        await until(lambda: self.coordinator.step >= step and len(self.metrics) >= step)


class Held:
    """An evaluation that goes on until `end` is set; then `raises`, or answers with `version`."""

    def __init__(self, raises=None, version=None):
        self.begun, self.end = asyncio.Event(), asyncio.Event()
        self.raises, self.version, self.cancelled = raises, version, 0

    async def __call__(self, replicas):
        self.replicas = replicas
        self.begun.set()
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.raises:
            raise self.raises
        return self.version


async def first(replicas):
    return 0


async def test_steps_go_on_while_a_pinned_replica_answers_and_it_catches_up_afterwards(tmp_path):
    rig, held = Rig(tmp_path), Held(version=2)
    rig.queue.hold(4)
    await rig.start(first, held)
    await rig.stepped(4)
    assert held.begun.is_set(), "it began after step 2"
    assert held.replicas == {1: rig.controls[1]}
    await until(lambda: rig.controls[0].committed == [0, 1, 2, 3, 4])
    assert rig.controls[1].committed == [0, 1, 2], "no publish reaches the pinned one"
    assert rig.rollouter.routed == (0,)
    assert rig.tables[-1].those("leased").keys() == {1}
    assert not rig.evaluated()
    held.end.set()
    await until(lambda: rig.controls[1].committed == [0, 1, 2, 4])
    await until(lambda: rig.rollouter.routed == (0, 1))  # requests reach it again: it has the version of the others
    rig.queue.ready[4].set()
    await rig.running
    assert rig.evaluated() == {5: (2, 0.5), 6: (6, 0.5)}, "it is on the line of the step that found it done"
    told = [(e["step"], e["version"], e["interval"]) for e in rig.events("evaluation")]
    assert told == [(0, 0, [0.2, 0.8]), (2, 2, [0.2, 0.8]), (6, 6, [0.2, 0.8])]
    assert [e["step"] for e in rig.events("evaluation_skipped")] == [4]
    assert rig.queue.published_versions == list(range(7))


async def test_the_last_step_waits_for_the_evaluation_under_way_then_all_replicas_answer(tmp_path):
    rig, held = Rig(tmp_path, max_steps=3), Held(version=2)
    await rig.start(first, held)
    await until(lambda: rig.coordinator.step == 3)
    assert rig.rollouter.asked == [("held_out", None), ("held_out", [1])]
    held.end.set()
    await rig.running
    assert rig.rollouter.asked[2:] == [("held_out", None)]
    assert [e["version"] for e in rig.events("evaluation")] == [0, 2, 3]
    assert rig.evaluated() == {3: (3, 0.5)}


@pytest.mark.parametrize(
    "error", [GenerationError("all lost"), ProcessDied("gone").of(Process("replica", 1)), DeadlineExceeded("")]
)
async def test_one_that_fails_is_tried_again_on_other_leases_with_the_version_of_then(tmp_path, error):
    rig, held = Rig(tmp_path), Held(raises=error)
    rig.queue.hold(2)
    rig.queue.hold(3)
    await rig.start(first, held)
    await held.begun.wait()
    held.end.set()
    await until(lambda: rig.rollouter.routed == (0, 1))
    rig.queue.ready[2].set()
    await rig.stepped(3)
    rig.queue.ready[3].set()
    await rig.running
    assert [(e["step"], e["version"], e["tries"]) for e in rig.events("evaluation_failed")] == [(2, 2, 1)]
    assert [(e["step"], e["version"]) for e in rig.events("evaluation_started")][:2] == [(2, 2), (3, 3)]
    assert rig.evaluated()[4] == (3, 0.5)
    assert not any("eval/failed" in m for m in rig.metrics)


async def test_one_that_fails_twice_is_counted_and_training_goes_on(tmp_path):
    rig = Rig(tmp_path, "eval.every_steps=4", max_steps=8)
    pinned = []

    async def fails(replicas):
        pinned.append(rig.coordinator.step)
        raise GenerationError("all prompts failed")

    await rig.start(first, fails, fails)
    await rig.running
    assert [e["tries"] for e in rig.events("evaluation_failed")] == [1, 2]
    counted = [m["step"] for m in rig.metrics if "eval/failed" in m]
    assert len(pinned) == 2
    assert len(counted) == 1
    assert 4 < counted[0] <= 8
    assert rig.evaluated() == {8: (8, 0.5)}


async def test_one_that_fails_in_the_last_step_is_not_due_again_but_counted(tmp_path):
    rig, held = Rig(tmp_path, max_steps=3), Held(raises=GenerationError("all lost"))
    await rig.start(first, held)
    await until(lambda: rig.coordinator.step == 3)
    held.end.set()
    await rig.running
    assert [m["step"] for m in rig.metrics if "eval/failed" in m] == [3]
    assert rig.evaluated() == {3: (3, 0.5)}


async def test_an_answer_by_another_version_than_the_pinned_one_is_no_result(tmp_path):
    rig, held = Rig(tmp_path), Held(version=1)
    held.end.set()
    await rig.start(first, held)
    await rig.running
    assert "version 2 was pinned" in rig.events("evaluation_failed")[0]["error"]


async def test_a_leased_replica_that_dies_is_replaced_and_the_next_set_is_not_asked_of_it(tmp_path):
    """Two replicas are leased; one dies in the first set, the other answers the second alone."""
    rig = Rig(tmp_path, "eval.leased_replicas=2", "data.eval.second=data/arithmetic_test.jsonl", num=3, max_steps=4)
    held = Held(version=2)
    await rig.start(first, first, held)
    await held.begun.wait()
    assert sorted(held.replicas) == [1, 2]
    rig.controls[1].dead = ProcessDied("killed")
    await until(lambda: len(rig.controls) == 4 and rig.controls[3].committed)
    assert sorted(rig.pool.those("leased")) == [2]
    assert rig.tables[-1].rows[1].incarnation > 0, "the rollout side knows, and lets the evaluation go on elsewhere"
    held.end.set()
    await rig.running
    assert [ids for _, ids in rig.rollouter.asked][2:4] == [[1, 2], [2]]
    assert ("reset",) in rig.controls[2].calls
    assert ("reset",) not in rig.controls[1].calls


async def test_without_a_replica_to_spare_it_stays_due(tmp_path):
    rig = Rig(tmp_path)

    async def one_dies():
        rig.may_start.clear()
        rig.controls[1].dead = ProcessDied("killed")
        await until(lambda: len(rig.controls) == 3)

    rig.trainers.on_step[1] = one_dies
    rig.queue.hold(2)
    await rig.start(first)
    await rig.stepped(2)
    assert not rig.events("evaluation_started"), "the only replica left generates"
    rig.may_start.set()
    await until(lambda: rig.controls[2].committed)
    rig.queue.ready[2].set()
    await rig.running
    started = [(e["step"], e["version"], e["replicas"]) for e in rig.events("evaluation_started")]
    assert started[0] == (3, 3, [1])


@pytest.mark.parametrize("where", ["groups", "last step"])
async def test_a_stop_waits_for_no_evaluation(tmp_path, where):
    last = where == "last step"
    rig, held = Rig(tmp_path, max_steps=3 if last else 6), Held()
    if not last:
        rig.queue.hold(2)
    await rig.start(first, held)
    await held.begun.wait()
    await until(lambda: rig.coordinator.step == (3 if last else 2))
    rig.coordinator.stop()
    await rig.running
    assert held.cancelled == 1
    assert rig.coordinator.step == (3 if last else 2)
    assert len(rig.metrics) == rig.coordinator.step, "also the step in progress has its line"


async def test_an_error_of_the_run_ends_the_evaluation_too(tmp_path):
    rig, held = Rig(tmp_path), Held()
    rig.queue.hold(2)
    await rig.start(first, held)
    await held.begun.wait()

    async def dead():
        raise ProcessDied("queue is gone")

    rig.queue.ping = dead
    with pytest.raises(ProcessDied, match="queue"):
        await rig.running
    assert held.cancelled == 1
    await rig.pool.fence()
    assert (rig.pool.those("leased"), sorted(rig.pool.newcomers)) == ({}, [0, 1]), (
        "the next branch of the run has all of them"
    )


@pytest.mark.parametrize("error", [DeadlineExceeded("too slow"), GenerationError("all responses failed")])
@pytest.mark.parametrize("leased", [0, 1])
async def test_one_that_fails_while_training_waits_is_counted_and_the_run_goes_on(tmp_path, error, leased):
    """Also before the first step. The other set is told; the mean over the sets is not."""
    keys = ["data.eval.second=data/arithmetic_test.jsonl", "eval.every_steps=3", f"eval.leased_replicas={leased}"]
    rig = Rig(tmp_path, *keys, max_steps=3)

    async def fails(replicas):
        raise error

    await rig.start(fails, first, fails, fails)
    await rig.running
    assert rig.coordinator.step == 3
    failed = [(e["step"], e["version"], e["error"]) for e in rig.events("evaluation_failed")]
    assert failed == [(0, 0, str(error)), (3, 3, str(error)), (3, 3, str(error))]
    assert [(e["step"], e["name"]) for e in rig.events("evaluation")] == [(0, "second")]
    assert {m["step"] for m in rig.metrics if m.get("eval/failed") == 1} == {1, 3}
    assert not rig.evaluated()


async def test_a_process_that_is_lost_during_an_evaluation_is_no_failed_evaluation(tmp_path):
    rig = Rig(tmp_path)

    async def lost(replicas):
        raise ProcessDied("gone").of(Process("replica", 0))

    await rig.start(lost)
    with pytest.raises(ProcessDied, match="gone"):
        await rig.running
