"""The trainer pool on a real Ray: two ranks, a queue actor, faults."""

import asyncio
import os
import signal
import time

import pytest
import ray

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import TrainerConfig
from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import ConfigError, DeadlineExceeded, LedgerError, ProcessDied, RunFailed
from asyncrl.remote import reply
from asyncrl.testing.backend_suite import VOCAB_SIZE, random_lease
from asyncrl.trainer.pool import TrainerPool
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.types import Manifest
from asyncrl.weights.plan import plan_buckets

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

START_S = 120
BUCKET_BYTES = 1 << 16


class Queue:
    """Serves the groups of one lease, as the message queue does, and fails where a test asks for it."""

    def __init__(self, groups):
        self._groups = {g.ordinal: g for g in groups}
        self._delay_s = 0.0

    def delay(self, seconds):
        self._delay_s = seconds

    def fetch(self, ordinals):
        time.sleep(self._delay_s)
        missing = [o for o in ordinals if o not in self._groups]
        if missing:
            raise LedgerError(f"fetch of group {missing[0]} refused")
        return [self._groups[o] for o in ordinals]

    def fail(self):
        raise RunFailed("budget spent")


def spec(path, **trainer):
    return TrainerSpec(
        model=ModelConfig(path=str(path)),
        trainer=TrainerConfig(**{"num_ranks": 2, "lr": 1e-2, "collective_timeout_s": 20, **trainer}),
        algorithm=AlgorithmConfig(),
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def lease():
    return random_lease(0)


@pytest.fixture(scope="module")
def queue(lease):
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False)
    yield ray.remote(num_cpus=0)(Queue).remote(lease.groups)
    ray.shutdown()


@pytest.fixture(scope="module")
def pool(queue, model_path):
    """Module-wide, so that only one test pays for the start; the last test of the file breaks it."""
    return asyncio.run(TrainerPool.start(spec(model_path), queue, 0, START_S))


async def test_steps_train_and_every_rank_has_one_thread(pool, lease):
    plans = lease.plans(num_ranks=2)
    metrics = [await pool.train_step(plans) for _ in range(3)]
    assert metrics[2].loss < metrics[0].loss
    assert metrics[0].trained_tokens == sum(t.num_trained_tokens for t in lease.trajectories.values())

    def threads(_):
        import threading

        import torch

        return threading.get_ident(), torch.get_num_threads(), torch.distributed.get_world_size()

    for actor in pool._actors:
        seen = {ray.get(actor.__ray_call__.remote(threads), timeout=10) for _ in range(3)}
        assert len(seen) == 1  # one thread for all calls: torch's thread count is a property of the thread
        assert next(iter(seen))[1:] == (1, 2)


async def test_ping_answers_during_a_step(pool, lease, queue):
    await reply(queue.delay.remote(1.0), timeout_s=5, what="delay")
    step = asyncio.ensure_future(pool.train_step(lease.plans(num_ranks=2)))
    try:
        await asyncio.sleep(0)
        cpu_s = await pool.ping(5.0)
        assert not step.done()
        assert cpu_s > 1.0  # two processes that imported torch
        await step
    finally:
        await reply(queue.delay.remote(0.0), timeout_s=5, what="delay")


async def test_errors_of_the_queue_arrive_as_themselves(pool, lease):
    from dataclasses import replace

    plans = [replace(p, ordinals=(*p.ordinals, 99)) for p in lease.plans(num_ranks=2)]
    with pytest.raises(LedgerError, match="group 99") as raised:
        await pool.train_step(plans)
    assert type(raised.value) is LedgerError  # not Ray's wrapper of a wrapper
    await pool.train_step(lease.plans(num_ranks=2))  # both ranks refused before any collective: the pool is whole


async def test_checkpoint_and_weights(pool, lease, tmp_path):
    from asyncrl.weights.transports import build_receiver

    plans = lease.plans(num_ranks=2)
    await pool.save(tmp_path / "trainer")
    first = await pool.train_step(plans)
    await pool.load(tmp_path / "trainer")
    assert await pool.train_step(plans) == first

    specs = await pool.weight_specs(START_S)
    source = await pool.open_weights(WeightsConfig(bucket_bytes=BUCKET_BYTES), 1, START_S)
    manifest = Manifest(1, 4, specs, plan_buckets(specs, BUCKET_BYTES))
    received = {}

    class Sink:
        def write(self, spec, offset, data):
            received[spec.name] = received.get(spec.name, 0) + data.numel()

    receiver = build_receiver(source)
    try:
        sent, digest = await asyncio.gather(
            pool.send_weights(manifest, 30.0), asyncio.to_thread(receiver.receive, manifest, Sink(), 30.0)
        )
    finally:
        receiver.close()
    assert sent == digest
    assert sent is not None
    assert received == {s.name: s.nbytes for s in specs}


async def test_a_publish_that_nobody_receives_fails_in_time_and_leaves_the_ranks_in_step(pool, lease):
    specs = await pool.weight_specs(START_S)
    await pool.open_weights(WeightsConfig(bucket_bytes=BUCKET_BYTES), 1, START_S)
    manifest = Manifest(2, 5, specs, plan_buckets(specs, BUCKET_BYTES))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await pool.send_weights(manifest, 1.0)
    assert time.monotonic() - started < 5
    await pool.train_step(lease.plans(num_ranks=2))


async def test_an_unusable_model_is_a_config_error_and_leaves_nothing_behind(queue, tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        await TrainerPool.start(spec(tmp_path / "absent", num_ranks=1), queue, 0, START_S)


async def test_a_start_that_is_too_slow_is_named(queue, model_path):
    with pytest.raises(DeadlineExceeded, match="trainer rank 0"):
        await TrainerPool.start(spec(model_path, num_ranks=1), queue, 0, 0.2)


async def test_replies_are_bounded_and_typed(queue):
    with pytest.raises(RunFailed, match="budget spent"):
        await reply(queue.fail.remote(), timeout_s=10, what="fail of the queue")
    await reply(queue.delay.remote(3.0), timeout_s=10, what="delay of the queue")
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="fetch of the queue"):
        await reply(queue.fetch.remote([]), timeout_s=0.3, what="fetch of the queue")
    assert time.monotonic() - started < 2
    await reply(queue.delay.remote(0.0), timeout_s=10, what="delay of the queue")


async def test_a_killed_rank_is_named_at_once(pool, lease, queue):
    pids = [ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10) for actor in pool._actors]
    await reply(queue.delay.remote(0.5), timeout_s=5, what="delay")
    step = asyncio.ensure_future(pool.train_step(lease.plans(num_ranks=2)))
    await pool.ping(5.0)
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ProcessDied, match="train_step of trainer rank 1"):
        await step
    assert time.monotonic() - started < 10
    with pytest.raises(ProcessDied, match="trainer rank 1"):
        await pool.ping(5.0)
    await pool.stop()
    await pool.stop()
    assert not _alive(pids[0])


def _alive(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().split()[2] == "Z":
                return False
        time.sleep(0.05)
    return True
