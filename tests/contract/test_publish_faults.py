"""Publishes over a real Ray: trainer, replicas and checkpoint engine, with processes that die or stop in the middle.

The buckets are small, so that a publish takes long enough to be hit. The trainer takes no step: what it publishes are
the weights of the model's files, and replicas, which start with placeholders, must answer as Hugging Face does.
"""

import asyncio
import os
import signal
import time

import numpy as np
import psutil
import pytest
import pytest_asyncio
import ray

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig, SamplingConfig, TorchEngineConfig
from asyncrl.config.weights import WeightsConfig
from asyncrl.driver.fleet.actor_channels import ReplicaActorChannel, channels
from asyncrl.driver.fleet.replica_pool import PoolSettings, ReplicaPool
from asyncrl.driver.fleet.trainer_pool import TrainerPool
from asyncrl.driver.publish.checkpoint_engine import CheckpointEngine
from asyncrl.errors import GenerationError, ProcessDied
from asyncrl.inference.replica import Replica
from asyncrl.inference.replica_actor import ReplicaControl, spawn_replica
from asyncrl.rollout.generation import GenerationClient
from asyncrl.types import GenerationRequest, ReplicaTable, SamplingParams
from asyncrl.weights.lock_files import SHARED_MEMORY
from asyncrl_testing.random_model import greedy_continuation, random_qwen3, write_random_qwen3
from asyncrl_testing.transport_rig import files_in
from tests.backends import trainer_spec
from tests.forks import fork_server
from tests.waiting import is_alive, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

SHAPE = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 1024}
PROMPT = [5, 9, 2, 17, 33]
START_S = 120.0
TRANSFER_TIMEOUT_S = 20.0
GATE_TIMEOUT_S = 30.0
"""Requests outlast a transfer that comes to its deadline."""
REJOIN_TIMEOUT_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def cluster():
    threads = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    with fork_server() as forks:
        with forks():
            ray.init("local", include_dashboard=False, log_to_driver=False, runtime_env=threads)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_random_qwen3(tmp_path_factory.mktemp("published"), **SHAPE)


@pytest.fixture(scope="module")
def expected(model_path):
    return greedy_continuation(random_qwen3(**SHAPE), PROMPT, 12)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def trainer(model_path):
    pool = await TrainerPool.start(trainer_spec(model_path, num_ranks=1), None, 0, START_S)
    yield pool
    await pool.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(cluster, model_path):
    """Two replicas of the embedded engine; what a test kills is whole again when it ends."""
    rollout = RolloutConfig(
        torch=TorchEngineConfig(num_slots=8, max_model_len=64, device="cpu"),
        sampling=SamplingConfig(max_response_tokens=50),
        gate_timeout_s=GATE_TIMEOUT_S,
    )

    routes = Routes()
    pool = ReplicaPool(
        lambda i: spawn_replica(rollout, ModelConfig(path=str(model_path)), i, num_gpus=0, environment={}),
        2,
        PoolSettings(
            max_restarts=8,
            start_timeout_s=START_S,
            health_interval_s=0.2,
            health_timeout_s=8.0,
            rejoin_timeout_s=REJOIN_TIMEOUT_S,
        ),
        on_event=lambda event: routes.events.append((event.kind, event.replica)),
    )
    pool.routes = routes
    await pool.start()
    watch = asyncio.create_task(pool.watch())
    yield pool
    watch.cancel()
    await pool.stop(3.0)


class Routes:
    """The rollout side: one generation client, if any, that is told of the replicas as a rollouter is."""

    def __init__(self):
        self.client = None
        self.events = []

    def of(self, replica_id):
        """The events of one replica."""
        return [event for event, replica in self.events if replica == replica_id]

    async def connect(self, pool):
        self.client = client = GenerationClient(
            "client", ReplicaTable(), request_timeout_s=60, poll_interval_s=0.01, waits_for_replacements=True
        )

        async def route(table):
            client.set_replicas(channels(table, "client"))

        await pool.set_listener(route)
        return client

    async def disconnect(self, pool):
        await pool.set_listener(None)
        await self.client.close()


async def whole(fleet, within_s=60):
    await until(lambda: len(fleet.members) == 2, "both replicas are up", within_s)


class Publishing:
    """The trainer's side of a checkpoint engine over `pool`. `under_way` is set when a transfer begins, and
    `before_sending` is awaited then, while its replicas wait for the weights."""

    def __init__(self, trainer, pool, **weights):
        self._trainer = trainer
        self.pool = pool
        self.under_way = asyncio.Event()
        self.before_sending = None
        settings = {
            "bucket_bytes": 4096,
            "transfer_timeout_s": TRANSFER_TIMEOUT_S,
            "publish_timeout_s": 60.0,
            **weights,
        }
        config = WeightsConfig(**settings)
        self.encodings = []
        self.engine = CheckpointEngine(
            config, self, pool, interrupt="abort_resume", rolling=config.rolling, encoding=config.encoding
        )

    async def weight_specs(self, timeout_s):
        return await self._trainer.weight_specs(timeout_s)

    async def open_weights(self, config, num_receivers, timeout_s):
        return await self._trainer.open_weights(config, num_receivers, timeout_s)

    async def interrupt_weights(self, timeout_s):
        await self._trainer.interrupt_weights(timeout_s)

    async def encode_weights(self, timeout_s):
        return await self._trainer.encode_weights(timeout_s)

    async def send_weights(self, manifest, timeout_s):
        self.encodings.append(manifest.encoding)
        self.under_way.set()
        if self.before_sending:
            await self.before_sending()
        return await self._trainer.send_weights(manifest, timeout_s)

    async def publish_hit_by(self, version, *, held, struck, blow):
        """A publish in whose middle the process `struck` gets the signal `blow`. `held`, one of its replicas, stands
        still when it comes, so that there is no end before it."""
        self.under_way.clear()
        publishing = asyncio.create_task(self.engine.publish(version))
        await asyncio.wait_for(self.under_way.wait(), 30)
        await asyncio.sleep(0.1)
        os.kill(held, signal.SIGSTOP)
        await asyncio.sleep(0.05)
        assert not publishing.done(), "make the buckets smaller: the publish is over"
        os.kill(struck, blow)
        if held != struck:
            os.kill(held, signal.SIGCONT)
        return await asyncio.wait_for(publishing, 45)

    async def pid(self, replica_id):
        return (await control_of(self.pool, replica_id).call(10, Replica.stats)).pid

    async def answers(self):
        """What each replica that is up says to the prompt, greedily; an error as text."""
        members = self.pool.members
        return dict(zip(members, await asyncio.gather(*map(ask, members.values())), strict=True))


def control_of(pool, replica_id):
    return pool.table.rows[replica_id].handle


async def ask(control, versions=None):
    """Greedy tokens, or an error as text; `versions` collects who sampled them."""
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    request = GenerationRequest(f"ask-{time.monotonic_ns()}", np.array(PROMPT, np.int32), sampling)
    channel = ReplicaActorChannel(0, control.handle, request.request_id)
    await channel.submit([request])
    ids, deadline = [], time.monotonic() + GATE_TIMEOUT_S + 25
    while time.monotonic() < deadline:
        for chunk in await channel.collect(1.0, 0.0):
            if chunk.error is not None:
                return chunk.error
            ids += chunk.token_ids.tolist()
            if versions is not None and len(chunk.token_ids):
                versions.add(chunk.version)
            if chunk.finish_reason is not None:
                return ids
    raise AssertionError("the replica did not answer")


def trainer_pids():
    tree = psutil.Process().children(recursive=True)
    return {p.pid for p in tree if "ray::TrainerWorker" in " ".join(p.cmdline())}


def requests(client, count=16):
    """Responses of 50 tokens that begin now."""
    sampling, prompt = SamplingParams(temperature=1.0, max_tokens=50), np.array(PROMPT, np.int32)
    return [asyncio.create_task(client.generate(prompt, sampling, seed=i)) for i in range(count)]


async def finished(running):
    """All of them end whole."""
    for generation in await asyncio.wait_for(asyncio.gather(*running), 60):
        assert len(generation.token_ids) == generation.segments[-1].stop == 50


@pytest.mark.parametrize("stage", [False, True])
async def test_a_replica_killed_in_the_middle_is_replaced_and_holds_up_neither_the_other_nor_requests(
    fleet, trainer, expected, stage
):
    publishing = Publishing(trainer, fleet, transport="ipc", verify="always", stage=stage)
    report = await publishing.engine.publish(0)
    assert (report.replicas, report.verified) == (2, True)
    assert await publishing.answers() == {0: expected, 1: expected}

    running = requests(await fleet.routes.connect(fleet))
    victim = await publishing.pid(1)
    report = await publishing.publish_hit_by(1, held=victim, struck=victim, blow=signal.SIGKILL)
    assert report.replicas == 1
    assert await ask(control_of(fleet, 0)) == expected
    await finished(running)
    await fleet.routes.disconnect(fleet)

    await whole(fleet)
    assert "placeholders" in (await publishing.answers())[1], "a replacement serves nothing before its first commit"
    assert (await publishing.engine.publish(2)).replicas == 2
    assert await publishing.answers() == {0: expected, 1: expected}
    assert await publishing.pid(1) != victim


async def generated(fleet, replica_id):
    return (await control_of(fleet, replica_id).call(10, Replica.stats)).health.generated_tokens


async def test_replicas_are_called_over_connections_also_by_the_control_that_follows_an_abandoned_one(fleet):
    control = ReplicaControl(0, control_of(fleet, 0).handle)  # the pool's own must not be abandoned
    pid = (await control.call(10, Replica.stats)).pid
    connection = control._connection
    assert connection._connection is not None, "not through Ray"
    assert not connection._connection.ended
    later = control.abandon()
    assert (await later.call(10, Replica.stats)).pid == pid
    assert later._connection is connection, "calls of both begin in their order"


async def test_differences_reach_who_has_their_base_and_all_weights_a_replacement(fleet, trainer, expected):
    publishing = Publishing(trainer, fleet, transport="collective", encoding="delta")
    for version in (0, 1):
        assert (await publishing.engine.publish(version)).verified
        assert await publishing.answers() == {0: expected, 1: expected}
    os.kill(await publishing.pid(1), signal.SIGKILL)
    await until(lambda: len(fleet.members) < 2, within_s=30)
    assert (await publishing.engine.publish(2)).replicas == 1
    await whole(fleet)
    reports = [await publishing.engine.publish(version) for version in (3, 4)]
    assert await publishing.answers() == {0: expected, 1: expected}
    assert publishing.encodings == ["full", "delta", "delta", "full", "delta"]
    assert reports[0].sent_bytes == reports[0].nbytes
    assert reports[1].sent_bytes == 0, "the trainer took no step"


@pytest.mark.parametrize(("when", "stage"), [("in the middle", True), ("before", False)])
async def test_a_stopped_replica_that_goes_on_rejoins_as_the_same_process_and_has_forgotten_everything(
    fleet, trainer, expected, when, stage
):
    publishing = Publishing(trainer, fleet, transport="ipc", verify="always", stage=stage)
    await publishing.engine.publish(11)
    victim = await publishing.pid(0)
    client = await fleet.routes.connect(fleet)
    fleet.routes.events.clear()
    if when == "before":  # its requests are on their way until it goes on: they arrive after its reset
        os.kill(victim, signal.SIGSTOP)
    running = requests(client)
    await asyncio.sleep(0.02)
    started = time.monotonic()
    try:
        if when == "before":
            report = await asyncio.wait_for(publishing.engine.publish(12), 60)
        else:
            report = await publishing.publish_hit_by(12, held=victim, struck=victim, blow=signal.SIGSTOP)
        assert report.replicas == 1
        assert time.monotonic() - started < 45, "the deadline of one transfer, and the next one without it"
        assert (await publishing.engine.publish(13)).replicas == 1
        await finished(running)
        assert (list(fleet.members), await ask(fleet.members[1])) == ([1], expected)
    finally:
        os.kill(victim, signal.SIGCONT)
    await whole(fleet, REJOIN_TIMEOUT_S)
    assert (await publishing.pid(0), list(fleet.newcomers), list(client.loads)) == (victim, [0], [1])
    sampled = await generated(fleet, 0)
    stale = ReplicaActorChannel(0, control_of(fleet, 0).handle, "client")
    assert await stale.collect(0.2, 0.0) == [], "nothing of what it was asked before is left for anybody"
    assert (await publishing.engine.publish(13, newcomers_only=True)).replicas == 1
    versions = set()
    assert (await ask(fleet.members[0], versions), versions) == (expected, {13})
    assert await generated(fleet, 0) == sampled + len(expected), "it works on nothing from before"
    assert sorted(client.loads) == [0, 1]
    await finished(requests(client))
    await fleet.routes.disconnect(fleet)
    assert fleet.routes.of(0) == ["replica_suspended", "replica_rejoined", "replica_serving"]
    assert (await publishing.engine.publish(14)).replicas == 2


async def test_a_stopped_replica_that_does_not_go_on_is_replaced(fleet, trainer, expected):
    publishing = Publishing(trainer, fleet, transport="collective")
    await publishing.engine.publish(3)
    victim = await publishing.pid(0)
    fleet.routes.events.clear()
    started = time.monotonic()
    report = await publishing.publish_hit_by(4, held=victim, struck=victim, blow=signal.SIGSTOP)
    assert report.replicas == 1
    assert time.monotonic() - started < 45, "the deadline of one transfer, and the next one without it"
    assert await ask(control_of(fleet, 1)) == expected
    await whole(fleet)
    assert time.monotonic() - started > REJOIN_TIMEOUT_S
    assert await publishing.pid(0) != victim
    assert (await publishing.engine.publish(5)).replicas == 2
    assert await publishing.answers() == {0: expected, 1: expected}
    assert fleet.routes.of(0) == ["replica_suspended", "replica_failed", "replica_started", "replica_serving"]


async def test_a_replica_that_gets_sigterm_leaves_in_good_order_and_its_requests_go_on_elsewhere(
    fleet, trainer, expected
):
    """Here nothing else brings it back: the pool replaces it, and no restart is counted."""
    publishing = Publishing(trainer, fleet)
    await publishing.engine.publish(40)
    restarts, victim = fleet._budget.total, await publishing.pid(1)
    client = await fleet.routes.connect(fleet)
    fleet.routes.events.clear()
    running = requests(client)
    await asyncio.sleep(0.02)
    os.kill(victim, signal.SIGTERM)
    await finished(running)
    await until(lambda: fleet.newcomers.keys() == {1})
    assert not psutil.pid_exists(victim)
    assert fleet.routes.of(1) == ["replica_left", "replica_joined", "replica_started"]
    assert fleet._budget.total == restarts
    assert (await publishing.engine.publish(41)).replicas == 2
    assert await publishing.answers() == {0: expected, 1: expected}
    await finished(requests(client))
    await fleet.routes.disconnect(fleet)


async def test_a_fenced_fleet_serves_the_lower_version_of_a_training_side_that_began_anew(fleet, trainer, expected):
    publishing = Publishing(trainer, fleet)
    await publishing.engine.publish(20)
    control = control_of(fleet, 0)
    channel = ReplicaActorChannel(0, control.handle, "former")
    sampling = SamplingParams(temperature=1.0, max_tokens=50)
    await channel.submit([GenerationRequest("from-before", np.array(PROMPT, np.int32), sampling)])
    await fleet.forget_client("former")
    await fleet.fence()
    assert fleet.serving == {}
    with pytest.raises(GenerationError, match="counts as dead"):
        await channel.submit([GenerationRequest("zombie", np.array(PROMPT, np.int32), sampling)])
    again = Publishing(trainer, fleet)
    assert (await again.engine.publish(15)).replicas == 2
    for member in fleet.serving.values():
        versions = set()
        assert (await ask(member, versions), versions) == (expected, {15})


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_while_a_rolling_publish_reaches_one_replica_the_other_generates(fleet, trainer, expected, transport):
    publishing = Publishing(trainer, fleet, transport=transport, rolling=True)
    await publishing.engine.publish(30)
    client = await fleet.routes.connect(fleet)
    ending, served = asyncio.Event(), []

    async def generate(seed, on_chunk=None):
        sampling, prompt = SamplingParams(temperature=1.0, max_tokens=50), np.array(PROMPT, np.int32)
        generation = await client.generate(prompt, sampling, seed=seed, on_chunk=on_chunk)
        assert len(generation.token_ids) == 50

    async def stream(seed):
        while not ending.is_set():
            await generate(seed)

    async def generate_during_the_wave():
        served.append(set())
        await generate(7, lambda chunk, replica_id: served[-1].add((replica_id, chunk.version)))

    streams = [asyncio.create_task(stream(i)) for i in range(6)]
    publishing.before_sending = generate_during_the_wave
    report = await publishing.engine.publish(31)
    ending.set()
    await asyncio.wait_for(asyncio.gather(*streams), 30)
    await fleet.routes.disconnect(fleet)
    assert (report.replicas, report.attempts) == (2, 2)
    assert [{version for _, version in wave} for wave in served] == [{30}, {31}]
    assert {replica for wave in served for replica, _ in wave} == {0, 1}, "one replica in each wave"
    assert report.pause_s < report.publish_s
    for member in fleet.serving.values():
        versions = set()
        assert (await ask(member, versions), versions) == (expected, {31})


@pytest.mark.parametrize("stage", [False, True])
async def test_a_trainer_killed_in_the_middle_ends_the_publish_and_nothing_half_updated_serves(
    fleet, trainer, model_path, expected, stage
):
    """With weights that are staged the old ones go on serving."""
    others = trainer_pids()
    second = await TrainerPool.start(trainer_spec(model_path, num_ranks=1), None, 0, START_S)
    (rank,) = trainer_pids() - others
    publishing = Publishing(second, fleet, stage=stage)
    await publishing.engine.publish(6)
    with pytest.raises(ProcessDied, match="trainer rank 0"):
        await publishing.publish_hit_by(7, held=await publishing.pid(0), struck=rank, blow=signal.SIGKILL)
    for answer in (await publishing.answers()).values():
        assert answer == expected if stage else "a publish of weights is in progress" in answer
    second.kill()
    again = Publishing(trainer, fleet)
    assert (await again.engine.publish(8)).replicas == 2
    assert await again.answers() == {0: expected, 1: expected}


async def test_a_shutdown_in_the_middle_of_a_publish_ends_in_time_and_leaves_nothing(fleet, trainer):
    publishing = Publishing(trainer, fleet)
    await publishing.engine.publish(9)
    pids = [*trainer_pids(), *[await publishing.pid(i) for i in range(2)]]
    publishing.under_way.clear()
    task = asyncio.create_task(publishing.engine.publish(10))
    await asyncio.wait_for(publishing.under_way.wait(), 30)
    assert files_in((SHARED_MEMORY,), pids), "the ring of the trainer"
    task.cancel()
    started = time.monotonic()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.gather(fleet.stop(3.0), trainer.stop())
    assert time.monotonic() - started < 45, "the deadline of one transfer, and the next one without it"
    assert not files_in((SHARED_MEMORY,), pids), "the sender has closed before its process was killed"
    await until(lambda: not any(map(is_alive, pids)))
