"""Colocated runs over scripted engines: coordinator, publisher, checkpoint engine, replica pool and replicas are real.
In every training step each engine that lives is asleep, whatever was lost before or is lost meanwhile."""

import asyncio
import random

import pytest

from asyncrl.driver.coordinator import Coordinator
from asyncrl.driver.fleet import engine_turns, replica_pool
from asyncrl.driver.fleet.device_turns import SharedDevices
from asyncrl.driver.fleet.engine_turns import EngineTurns
from asyncrl.driver.fleet.replica_pool import PoolSettings, ReplicaPool
from asyncrl.errors import DeadlineExceeded, ProcessDied, RunFailed
from asyncrl.inference.replica import Replica
from asyncrl.observability.events import EventLog
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.fake_fleet import GOOD, FakeTrainer
from tests.concurrency.test_coordinator import Queue, Rollouter, Trainers, Written, parts_of, waiting_for_groups
from tests.concurrency.test_coordinator import _short_polls as _short_polls
from tests.concurrency.test_fleet_size import Control
from tests.make import quickstart
from tests.waiting import until

PARTS = {"weights", "kv_cache"}


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    for module in (replica_pool, engine_turns):
        monkeypatch.setattr(module, "ASK_AGAIN_S", 0.002)
    monkeypatch.setattr(engine_turns, "SLEEP_S", 0.2)


async def digest_of(manifest, source, timeout_s):
    return GOOD if manifest.verify else None


class Process:
    """The process of a replica: a real replica over a fake engine, reached as over Ray. `mute`: it answers nothing for
    now. Killed, it keeps its memory until it has `exited`."""

    def __init__(self, replica_id, rig):
        self.rig, self.replica_id = rig, replica_id
        self.engine = FakeEngine(FakeScript(start_version=None, load_hook=digest_of))
        self.replica = Replica(replica_id, lambda: self.engine, gate_timeout_s=20)
        self.loaded = self.killed = self.exited = self.mute = False

    async def load(self):
        assert not self.rig.training, "an engine loads in the trainer's turn"
        self.loaded = True
        await asyncio.sleep(self.rig.load_s)

    async def placed(self, timeout_s):
        await self.rig.has_place.wait()

    async def ended(self):
        await until(lambda: self.exited)

    @property
    def holds_memory(self):
        return self.loaded and not self.exited and self.engine.asleep != PARTS

    async def call(self, timeout_s, method, *args):
        await asyncio.sleep(0)
        if self.mute:
            await asyncio.sleep(min(timeout_s, 0.05))
            raise DeadlineExceeded(f"replica {self.replica_id} does not answer")
        if self.killed:
            raise ProcessDied(f"replica {self.replica_id} was killed")
        return await getattr(self.replica, method.__name__)(*args)

    def die(self):
        self.killed = True
        self.engine.crash("its process was killed")
        asyncio.get_running_loop().call_later(self.rig.exit_s, self._exit)

    def _exit(self):
        self.exited = True


class Steps(Trainers):
    """Looks at every engine when a step begins, in its middle and when it ends."""

    def __init__(self, rig):
        super().__init__()
        self.rig = rig

    async def train_step(self, plans):
        self.rig.training = True
        self.rig.look()
        outcome = await super().train_step(plans)
        await asyncio.sleep(0.003)
        self.rig.look()
        self.rig.training = False
        self.rig.steps += 1
        return outcome


class Rig(Written):
    def __init__(self, path, *overrides, max_steps=3, num=2, max_restarts=50, **settings):
        self.path, self.training, self.steps, self.load_s, self.exit_s = path, False, 0, 0.0, 0.004
        self.processes = []
        self.has_place = asyncio.Event()
        self.has_place.set()
        self.recipe = quickstart(
            *("eval.every_steps=0", f"run.max_steps={max_steps}", "ray.health_interval_s=0.005"),
            *("placement=colocated", "mode=sync", f"rollout.num_replicas={num}", *overrides),
        )
        self.log = EventLog(path / "events.jsonl")
        times = {"start_timeout_s": 5, "health_interval_s": 0.004, "health_timeout_s": 1, **settings}
        self.pool = ReplicaPool(
            self.spawn,
            num,
            PoolSettings(max_restarts, restart_delay_s=0, **times),
            on_event=self.log.write,
            devices=(devices := SharedDevices()),
        )
        self.engines = EngineTurns(self.pool, devices, start_timeout_s=times["start_timeout_s"])
        self.turns = devices.turns
        self.queue, self.trainers, self.rollouter, self.trainer = Queue(), Steps(self), Rollouter(), FakeTrainer()
        self.coordinator = self.new_coordinator()

    def new_coordinator(self):
        interrupt = self.recipe.interrupt
        parts = parts_of(self, self.pool, self.log, interrupt=interrupt, engines=self.engines, blame_s=0.01)
        return Coordinator(self.recipe, parts, None)

    def spawn(self, replica_id):
        self.processes.append(Process(replica_id, self))
        return Control(self.processes[-1])

    def look(self):
        holding = [p.replica_id for p in self.processes if p.holds_memory]
        assert not holding, f"replicas {holding} hold memory in the trainer's turn"

    def living(self):
        return [p for p in self.processes if p.loaded and not p.killed]

    async def lose_a_rank(self):
        """A training side that fails by it, and the next one, which goes on to the end."""
        await self.begin()
        with pytest.raises(ProcessDied):
            await asyncio.wait_for(self.coordinator.run(), 20)
        self.training = False
        await self.pool.fence()
        await self.engines.sleep()
        self.look()
        self.coordinator = self.new_coordinator()
        await asyncio.wait_for(self.coordinator.run(), 20)
        assert self.versions() == [3, 3]
        await self.pool.stop(1)

    async def begin(self):
        await self.pool.start()
        await self.engines.sleep()
        self.look()

    async def run(self):
        await self.begin()
        await asyncio.wait_for(self.coordinator.run(), 20)
        await self.pool.stop(1)

    def versions(self):
        return [p.replica._engine.health().version for p in self.living()]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("mode=one_step_off", "trainer.step_timeout_s=60", "weights.publish_timeout_s=60"),
    ],
)
async def test_the_phases_alternate(tmp_path, overrides):
    rig = Rig(tmp_path, *overrides)
    await rig.begin()
    await asyncio.wait_for(rig.coordinator.run(), 20)
    assert rig.versions() == [3, 3]
    assert all(p.engine.asleep == frozenset() for p in rig.processes), "the last publish has woken them"
    order = rig.told("engines_slept", "step", "publish")
    turns = [(("engines_slept", n), ("step", n), ("publish", n)) for n in (1, 2, 3)]
    assert order == [("publish", 0), *(entry for turn in turns for entry in turn)]
    for line in rig.metrics:
        assert line["sleep/asleep_s"] > 0
        assert line["sleep/begin_s"] > 0
        assert line["sleep/waking_s"] >= 0
        assert line["trainer_time/sleep"] > 0
        assert sum(value for key, value in line.items() if key.startswith("trainer_time/")) == pytest.approx(1)
    await rig.pool.stop(1)


async def test_a_replica_that_dies_in_the_trainers_turn_is_replaced_after_it(tmp_path):
    rig = Rig(tmp_path)

    async def dies():
        rig.living()[0].die()
        await until(lambda: len(rig.processes) == 3)
        await asyncio.sleep(0.02)
        assert not rig.processes[2].loaded, "its memory is the trainer's"

    rig.trainers.on_step[0] = dies
    rig.queue.hold(1)
    running = asyncio.create_task(rig.run())
    await until(lambda: rig.processes[2:] and rig.versions() == [1, 1])  # it catches up while the step waits
    rig.queue.ready[1].set()
    await running
    assert rig.steps == 3
    assert rig.events("engines_slept")[1]["replicas"] == [0, 1]


async def test_a_run_whose_replicas_all_die_in_the_trainers_turn_goes_on(tmp_path):
    rig = Rig(tmp_path)

    async def all_die():
        for process in rig.living():
            process.die()
        await until(lambda: len(rig.processes) == 4)

    rig.trainers.on_step[1] = all_die
    await rig.run()
    assert rig.steps == 3
    assert len(rig.processes) == 4


async def test_a_replica_that_does_not_sleep_is_killed_and_the_step_waits_for_its_exit(tmp_path):
    rig = Rig(tmp_path)
    rig.exit_s = 0.05
    running = await waiting_for_groups(rig, 0)

    async def hangs():
        await asyncio.Event().wait()

    stuck = rig.processes[1]
    stuck.replica.sleep = lambda: asyncio.wait_for(hangs(), 0.05)  # a TimeoutError of the engine
    rig.queue.ready[0].set()
    await running
    assert stuck.exited
    assert rig.steps == 3
    assert [e["replica"] for e in rig.events("replica_failed")] == [1]
    assert rig.events("engines_slept")[0]["replicas"] == [0]


async def test_a_suspended_replica_is_killed_because_nobody_knows_whether_it_sleeps(tmp_path):
    rig = Rig(tmp_path, rejoin_timeout_s=10)
    running = await waiting_for_groups(rig, 0)
    late = rig.processes[0]
    late.mute = True
    await until(lambda: rig.events("replica_suspended"))
    rig.queue.ready[0].set()
    await running
    assert late.killed
    assert rig.steps == 3


async def test_a_replica_that_is_late_while_it_sleeps_rejoins(tmp_path):
    rig = Rig(tmp_path, rejoin_timeout_s=10)

    async def late():
        rig.processes[0].mute = True
        await until(lambda: rig.events("replica_suspended"))
        rig.processes[0].mute = False
        await until(lambda: rig.events("replica_rejoined"))

    rig.trainers.on_step[0] = late
    await rig.run()
    assert len(rig.processes) == 2
    assert rig.steps == 3


async def test_the_step_waits_for_a_replica_that_loads(tmp_path):
    rig = Rig(tmp_path)
    running = await waiting_for_groups(rig, 0)
    rig.load_s = 0.1
    rig.processes[0].die()
    await until(lambda: rig.processes[2:] and rig.processes[2].loaded)
    rig.queue.ready[0].set()
    await running
    assert rig.events("engines_slept")[0]["replicas"] == [0, 1]
    assert rig.steps == 3


async def test_a_stop_in_the_trainers_turn_leaves_a_checkpoint_and_the_engines_asleep(tmp_path):
    rig = Rig(tmp_path)

    async def stop():
        rig.coordinator.stop()

    rig.trainers.on_step[1] = stop
    await rig.run()
    assert rig.steps == 2
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_2"]
    assert rig.turns.phase == "training"


async def test_a_failed_step_leaves_the_devices_to_the_next_training_side(tmp_path):
    rig = Rig(tmp_path)

    async def fails():
        del rig.trainers.on_step[1]
        raise ProcessDied("a rank died")

    rig.trainers.on_step[1] = fails
    await rig.lose_a_rank()


async def test_a_failed_publish_leaves_the_devices_to_the_next_training_side(tmp_path):
    rig = Rig(tmp_path)
    rig.trainer.outcomes = [GOOD, ProcessDied("a rank died while it sent")]
    await rig.lose_a_rank()


async def test_an_evaluation_comes_while_the_engines_are_awake(tmp_path):
    rig = Rig(tmp_path, "eval.every_steps=1")

    async def answered():
        assert all(p.engine.asleep == frozenset() for p in rig.living())

    rig.rollouter.on_evaluate = [answered] * 4
    await rig.run()
    assert rig.rollouter.evaluations == 4


async def test_a_replica_that_waits_for_a_place_keeps_the_trainer_from_nothing(tmp_path):
    """It holds no memory of the devices: it counts as awake only when it loads."""
    rig = Rig(tmp_path, start_timeout_s=60)
    await rig.begin()
    rig.has_place.clear()
    rig.pool.fail(0, rig.pool.table.rows[0].handle, ProcessDied("its node was lost"))
    await asyncio.wait_for(rig.coordinator.run(), 20)
    assert rig.steps == 3
    assert rig.pool.table.rows[0].state == "starting"
    await rig.pool.stop(1)


async def test_a_replica_that_leaves_while_it_waits_for_its_turn_never_loads(tmp_path):
    rig = Rig(tmp_path, is_resized=True)
    await rig.begin()
    rig.pool.fail(0, rig.pool.table.rows[0].handle, ProcessDied("its engine is dead"))
    await until(lambda: len(rig.processes) == 3)
    rig.pool.leave(0, "preempted")
    await until(lambda: 0 not in rig.pool.table.rows)
    await asyncio.wait_for(rig.coordinator.run(), 20)
    assert not rig.processes[2].loaded
    assert rig.steps == 3
    await rig.pool.stop(1)


async def test_a_process_that_never_exits_ends_the_wait_for_the_turn(tmp_path, monkeypatch):
    for module in (replica_pool, engine_turns):
        monkeypatch.setattr(module, "EXIT_S", 0.05)
    rig = Rig(tmp_path, start_timeout_s=0.2)
    rig.exit_s = 1000
    await rig.pool.start()
    rig.pool.fail(0, rig.pool.table.rows[0].handle, ProcessDied("its engine is dead"))
    with pytest.raises(DeadlineExceeded, match=r"(?s)replicas \[0\] hold memory"):
        await asyncio.wait_for(rig.engines.sleep(), 5)
    await rig.pool.stop(1)


async def test_a_spent_budget_ends_the_wait_for_the_turn(tmp_path):
    rig = Rig(tmp_path, max_restarts=0)
    rig.exit_s = 1000
    await rig.pool.start()
    rig.pool.fail(0, rig.pool.table.rows[0].handle, ProcessDied("its engine is dead"))
    with pytest.raises(RunFailed):
        await asyncio.wait_for(rig.engines.sleep(), 5)
    await rig.pool.stop(1)


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_is_lost_the_run_ends_whole_and_no_step_meets_an_engine(tmp_path, seed):
    """Replicas die, fall silent and come back at random moments, in every phase."""
    rig, draw = Rig(tmp_path, max_steps=6, rejoin_timeout_s=0.3), random.Random(seed)
    rig.load_s = 0.003

    async def faults():
        while True:
            await asyncio.sleep(draw.random() * 0.03)
            if not (living := rig.living()):
                continue
            process = draw.choice(living)
            if draw.random() < 0.5:
                process.die()
            else:
                process.mute = True
                asyncio.get_running_loop().call_later(draw.random() * 0.2, setattr, process, "mute", False)

    await rig.begin()
    breaking = asyncio.create_task(faults())
    try:
        await asyncio.wait_for(rig.coordinator.run(), 60)
    except DeadlineExceeded as error:
        # all that were up fell silent in a publish and answered the health check after it: its deadline is too short
        if "does not answer" not in str(error):
            raise
        assert rig.queue.published_versions == list(range(len(rig.queue.published_versions)))
        return
    finally:
        breaking.cancel()
        await rig.pool.stop(1)
    assert rig.steps == 6
    assert rig.queue.published_versions == list(range(7))
