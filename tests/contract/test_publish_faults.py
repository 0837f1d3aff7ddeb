"""Publishes over a real Ray: trainer, replicas and checkpoint engine, with processes that die or stop in the middle.

The buckets are small, so that a publish takes long enough to be hit. The trainer takes no step: what it publishes are
the weights of the model's files, and replicas, which start with placeholders, must answer as Hugging Face does.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import ray

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig, SamplingConfig, TorchEngineConfig
from asyncrl.config.trainer import TrainerConfig
from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import ProcessDied
from asyncrl.inference.channel import spawn_replica
from asyncrl.inference.pool import PoolSettings, ReplicaPool
from asyncrl.rollout.channels import ReplicaActorChannel
from asyncrl.rollout.generation import GenerationClient
from asyncrl.testing.random_model import greedy_continuation, random_qwen3, write_random_qwen3
from asyncrl.trainer.pool import TrainerPool
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.types import GenerationRequest, SamplingParams
from asyncrl.weights.checkpoint_engine import CheckpointEngine

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SHAPE = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 1024}
PROMPT = [5, 9, 2, 17, 33]
START_S = 120.0
GATE_TIMEOUT_S = 6.0


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_random_qwen3(tmp_path_factory.mktemp("published"), **SHAPE)


@pytest.fixture(scope="module")
def expected(model_path):
    return greedy_continuation(random_qwen3(**SHAPE), PROMPT, 12)


def trainer_spec(path):
    return TrainerSpec(
        model=ModelConfig(path=str(path)), trainer=TrainerConfig(num_ranks=1), algorithm=AlgorithmConfig()
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def trainer(model_path):
    pool = await TrainerPool.start(trainer_spec(model_path), None, 0, START_S)
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

    async def announce(replica_id, control):
        pass

    async def retire(replica_id):
        pass

    pool = ReplicaPool(
        lambda i: spawn_replica(rollout, ModelConfig(path=str(model_path)), i, num_gpus=0, environment={}),
        2,
        PoolSettings(max_restarts=5, start_timeout_s=START_S, health_interval_s=0.2, health_timeout_s=2.0),
        announce=announce,
        retire=retire,
        on_event=lambda event, **fields: None,
    )
    await pool.start()
    watch = asyncio.create_task(pool.watch())
    yield pool
    watch.cancel()
    await pool.stop(3.0)


async def whole(fleet, timeout_s=60):
    """Returns when both replicas are up."""
    async with asyncio.timeout(timeout_s):
        while len(fleet.members) < 2:
            await asyncio.sleep(0.05)


class Publishing:
    """The trainer's side of a checkpoint engine over `pool`. `under_way` is set when a transfer begins."""

    def __init__(self, trainer, pool, **weights):
        self._trainer = trainer
        self.pool = pool
        self.under_way = asyncio.Event()
        settings = {"bucket_bytes": 4096, "transfer_timeout_s": 30.0, "publish_timeout_s": 60.0, **weights}
        self.engine = CheckpointEngine(WeightsConfig(**settings), self, pool, interrupt="abort_resume")

    async def weight_specs(self, timeout_s):
        return await self._trainer.weight_specs(timeout_s)

    async def open_weights(self, config, num_receivers, timeout_s):
        return await self._trainer.open_weights(config, num_receivers, timeout_s)

    async def interrupt_weights(self, timeout_s):
        await self._trainer.interrupt_weights(timeout_s)

    async def send_weights(self, manifest, timeout_s):
        self.under_way.set()
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
        return (await self.pool.controls[replica_id].stats(10)).pid

    async def answers(self):
        """What each replica that is up says to the prompt, greedily; an error as text."""
        return {i: await ask(control) for i, control in self.pool.members.items()}


async def ask(control):
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    request = GenerationRequest(f"ask-{time.monotonic_ns()}", np.array(PROMPT, np.int32), sampling)
    channel = ReplicaActorChannel(0, control.handle, "test")
    await channel.submit([request])
    ids, deadline = [], time.monotonic() + 20
    while time.monotonic() < deadline:
        for chunk in await channel.collect(1.0):
            if chunk.error is not None:
                return chunk.error
            ids += chunk.token_ids.tolist()
            if chunk.finish_reason is not None:
                return ids
    raise AssertionError("the replica did not answer")


def trainer_pids():
    tree = psutil.Process().children(recursive=True)
    return {p.pid for p in tree if "ray::TrainerActor" in " ".join(p.cmdline())}


def weight_files(pids):
    """Segments and sockets of these processes."""
    return [p.name for p in Path("/dev/shm").glob("asyncrl-weights-*") if int(p.name.split("-")[2]) in pids]


async def test_a_replica_killed_in_the_middle_is_replaced_and_holds_up_neither_the_other_nor_requests(
    fleet, trainer, expected
):
    publishing = Publishing(trainer, fleet, transport="ipc", verify="always")
    report = await publishing.engine.publish(0)
    assert (report.replicas, report.verified) == (2, True)
    assert await publishing.answers() == {0: expected, 1: expected}

    channels = {i: ReplicaActorChannel(i, c.handle, "client") for i, c in fleet.controls.items()}
    client = GenerationClient("client", channels, request_timeout_s=60, poll_interval_s=0.01)
    sampling = SamplingParams(temperature=1.0, max_tokens=50)
    prompt = np.array(PROMPT, np.int32)
    running = [asyncio.create_task(client.generate(prompt, sampling, seed=i)) for i in range(16)]
    victim = await publishing.pid(1)
    report = await publishing.publish_hit_by(1, held=victim, struck=victim, blow=signal.SIGKILL)
    assert report.replicas == 1
    assert await ask(fleet.controls[0]) == expected
    for generation in await asyncio.wait_for(asyncio.gather(*running), 60):
        assert len(generation.token_ids) == generation.segments[-1].stop == 50
    await client.close()

    await whole(fleet)
    assert "placeholders" in (await publishing.answers())[1], "a replacement serves nothing before its first commit"
    assert (await publishing.engine.publish(2)).replicas == 2
    assert await publishing.answers() == {0: expected, 1: expected}
    assert await publishing.pid(1) != victim


async def test_a_stopped_replica_is_found_out_and_the_publish_goes_on_without_it(fleet, trainer, expected):
    publishing = Publishing(trainer, fleet, transport="collective")
    await publishing.engine.publish(3)
    victim = await publishing.pid(0)
    started = time.monotonic()
    report = await publishing.publish_hit_by(4, held=victim, struck=victim, blow=signal.SIGSTOP)
    assert report.replicas == 1
    assert time.monotonic() - started < 30
    assert await ask(fleet.controls[1]) == expected
    await whole(fleet)
    assert (await publishing.engine.publish(5)).replicas == 2
    assert await publishing.answers() == {0: expected, 1: expected}


async def test_a_trainer_killed_in_the_middle_ends_the_publish_and_nothing_half_updated_serves(
    fleet, trainer, model_path, expected
):
    others = trainer_pids()
    second = await TrainerPool.start(trainer_spec(model_path), None, 0, START_S)
    (rank,) = trainer_pids() - others
    publishing = Publishing(second, fleet)
    await publishing.engine.publish(6)
    with pytest.raises(ProcessDied, match="trainer rank 0"):
        await publishing.publish_hit_by(7, held=await publishing.pid(0), struck=rank, blow=signal.SIGKILL)
    for answer in (await publishing.answers()).values():
        assert "a publish of weights is in progress" in answer
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
    assert weight_files(pids), "the ring of the trainer"
    task.cancel()
    started = time.monotonic()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.gather(fleet.stop(3.0), trainer.stop())
    assert time.monotonic() - started < 15
    assert not weight_files(pids), "the sender has closed before its process was killed"
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
