"""The trainer pool on a real Ray: two ranks, a queue actor, faults."""

import asyncio
import itertools
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from datetime import timedelta

import pytest
import pytest_asyncio
import ray
import torch.distributed as dist

from asyncrl.checkpoint.digests import FileDigest
from asyncrl.config.algorithm import AlgorithmConfig, KlConfig
from asyncrl.config.trainer import MegatronConfig
from asyncrl.config.weights import WeightsConfig
from asyncrl.driver.fleet.trainer_pool import TrainerPool
from asyncrl.errors import (
    ConfigError,
    DeadlineExceeded,
    LedgerError,
    ProcessDied,
    RunFailed,
    StorageError,
    WeightTransferError,
)
from asyncrl.remote.reply import _translate, reply
from asyncrl.remote.waits import MESSAGE_QUEUE, Wait, trainer_rank
from asyncrl.trainer.rank_device import await_peers
from asyncrl.trainer.trainer_worker import TrainerWorker, in_thread
from asyncrl.types import Manifest
from asyncrl.weights.lock_files import SHARED_MEMORY
from asyncrl.weights.plan import make_manifest, plan_buckets
from asyncrl.weights.transports import build_receiver
from asyncrl.weights.transports.process_group import host_store
from asyncrl_testing.backend_suite import random_lease, write_model
from asyncrl_testing.transport_rig import files_in
from tests.backends import trainer_spec
from tests.forks import fork_server
from tests.make import needs_megatron
from tests.waiting import is_alive, until, wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

START_S = 120
BUCKET_BYTES = 1 << 16


class Queue:
    """Serves the groups of one lease, as the message queue does, and fails where a test asks for it."""

    def __init__(self, groups):
        self._groups = {g.ordinal: g for g in groups}
        self._awaited = None
        self._fetches, self._foresees = 0, False

    def wait_for(self, path):
        """Fetches wait until there is such a file, at most two minutes."""
        self._awaited = path

    def fetches(self):
        return self._fetches

    def foresee(self, foresees):
        self._foresees = foresees

    def fetch_ahead(self, keys):
        return {(o, i): self._groups[o].sequences[i] for o, i in keys if self._foresees}

    def fetch(self, keys):
        self._fetches += 1
        if self._awaited is not None:
            wait_until(self._awaited.exists, within_s=120)
        missing = [ordinal for ordinal, _ in keys if ordinal not in self._groups]
        if missing:
            raise LedgerError(f"fetch of group {missing[0]} refused")
        return [self._groups[ordinal].sequences[index] for ordinal, index in keys]

    def fail(self):
        raise RunFailed("budget spent")


def spec(path, **trainer):
    usual = {"num_ranks": 2, "lr": 1e-2, "collective_timeout_s": 20, "num_threads": 2}
    return trainer_spec(path, AlgorithmConfig(kl=KlConfig(coefficient=1e-6)), **usual | trainer)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def lease():
    return random_lease(0)


@pytest.fixture(scope="module")
def queue(lease):
    with fork_server() as forks:
        with forks():
            # a GPU by name alone
            ray.init("local", include_dashboard=False, num_cpus=2, num_gpus=1, log_to_driver=False)
        yield ray.remote(num_cpus=0, max_concurrency=4)(Queue).remote(lease.groups)
        ray.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(queue, model_path):
    """Module-wide, so that only one test pays for the start; the last test that takes it breaks it."""
    pool = await TrainerPool.start(spec(model_path), queue, 0, START_S)
    yield pool
    await pool.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages(queue, model_path):
    """Two pipeline stages."""
    found = spec(model_path, backend="megatron", megatron=MegatronConfig(pipeline_parallel=2))
    pool = await TrainerPool.start(found, queue, 0, START_S)
    yield pool
    pool.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def sending(queue, model_path):
    """Ranks that send snapshots."""
    found = replace(spec(model_path), sends_snapshots=True)
    pool = await TrainerPool.start(found, queue, 0, START_S)
    yield pool
    pool.kill()


async def told(method, *words):
    """What the queue answers."""
    return await reply(method.remote(*words), timeout_s=10, call="queue", process=MESSAGE_QUEUE)


async def test_the_divergence_of_every_trajectory_comes_from_its_rank(pool, lease):
    found = await pool.reference_kl(lease.plans(num_plans=2))
    assert set(found) == set(lease.trajectories)
    for key, t in lease.trajectories.items():
        assert (found[key] > 0) == (t.num_trained_tokens > 0)


async def test_steps_train_and_every_rank_computes_with_its_threads(pool, lease):
    plans = lease.plans(num_plans=2)
    metrics = [await pool.train_step(plans) for _ in range(3)]
    assert metrics[2].loss < metrics[0].loss
    assert metrics[0].trained_tokens == sum(t.num_trained_tokens for t in lease.trajectories.values())

    def threads():
        import threading

        import torch

        return threading.get_ident(), torch.get_num_threads(), torch.distributed.get_world_size()

    def in_training(actor):
        import asyncio

        return asyncio.run(actor.threads["train"].do(threads))  # Ray calls this outside of the actor's event loop

    for actor in pool._actors:
        ask = actor.handle.__ray_call__
        seen = {ray.get(ask.remote(in_training), timeout=10) for _ in range(3)}
        assert len(seen) == 1  # one thread for all calls: torch's thread count is a property of the thread
        assert next(iter(seen))[1:] == (2, 2)  # threads, ranks


@asynccontextmanager
async def during_a_step(pool, queue, plans, place):
    """A step that waits for its groups until the end."""
    await told(queue.wait_for, place / "go")
    step = asyncio.ensure_future(pool.train_step(plans))
    try:
        yield
        assert not step.done()
    finally:
        (place / "go").touch()
        await step
        await told(queue.wait_for, None)


async def test_ranks_answer_a_ping_and_fetch_for_the_next_step_while_one_trains(pool, lease, queue, tmp_path):
    plans = lease.plans(num_plans=2)
    await told(queue.foresee, True)
    async with during_a_step(pool, queue, plans, tmp_path):
        assert await pool.ping(20.0) > 1.0, "two processes that imported torch"
        await asyncio.wait_for(pool.fetch_ahead(plans), 20)
    fetched = await told(queue.fetches)
    await pool.train_step(plans)
    assert await told(queue.fetches) == fetched, "both ranks held what their plans name"
    await told(queue.foresee, False)
    await pool.fetch_ahead(plans)
    await pool.train_step(plans)
    assert await told(queue.fetches) == fetched + 2, "nothing was foreseen"


class Stuck(TrainerWorker):
    """Its sending end does not close: NCCL, say, has not let go of a publish."""

    @in_thread("end a send")
    def close_weights(self):
        time.sleep(60)


async def test_ping_answers_while_a_publish_does_not_end(queue, model_path):
    stuck = ray.remote(num_cpus=0)(Stuck).remote(spec(model_path), 0, None, None, None)
    pool = TrainerPool(spec(model_path), [stuck])
    try:
        assert await pool.ping(START_S) > 0
        closing = asyncio.ensure_future(pool._actors[0].call(60, TrainerWorker.close_weights))
        await asyncio.sleep(0.5)
        assert await pool.ping(10.0) > 0, "or the health check would restart the training side"
        assert not closing.done()
        closing.cancel()
    finally:
        pool.kill()


async def test_errors_of_the_queue_arrive_as_themselves(pool, lease):
    of_another = lambda run: tuple(replace(s, ordinal=99) for s in run)  # noqa: E731
    plans = [replace(p, updates=tuple(tuple(map(of_another, u)) for u in p.updates)) for p in lease.plans(num_plans=2)]
    with pytest.raises(LedgerError, match="group 99") as raised:
        await pool.train_step(plans)
    assert type(raised.value) is LedgerError  # not Ray's wrapper of a wrapper
    await pool.train_step(lease.plans(num_plans=2))  # both ranks refused before any collective: the pool is whole


async def test_checkpoint_and_weights(pool, lease, tmp_path):
    plans = lease.plans(num_plans=2)
    await pool.capture()
    first = await pool.train_step(plans)
    written = await pool.save(tmp_path / "trainer", START_S)
    assert written == {path.name: FileDigest.of(path) for path in (tmp_path / "trainer").iterdir()}
    await pool.load(tmp_path / "trainer")
    assert await pool.train_step(plans) == first

    specs = await pool.weight_specs(START_S)
    source = await opened(pool, WeightsConfig(bucket_bytes=BUCKET_BYTES))
    manifest = Manifest(1, 4, specs, plan_buckets(specs, BUCKET_BYTES))
    sink = RefusingSink()
    sent, digest = await published(pool, source, manifest, sink)
    assert sent == digest
    assert sent is not None
    assert sink.received == {s.name: s.nbytes for s in specs}


async def opened(pool, config):
    """The source of one receiver."""
    return (await pool.open_weights(config, {None: 1}, START_S))[None]


async def test_a_rank_on_each_node_sends_all_tensors_to_the_replicas_there(pool):
    """As `ipc` does where ranks are on several nodes; the next publish takes other ranks."""
    specs, config = await pool.weight_specs(START_S), WeightsConfig(bucket_bytes=BUCKET_BYTES, transport="ipc")

    async def publish(number, num_receivers):
        sources = await pool.open_weights(config, num_receivers, START_S)
        assert sources.keys() == num_receivers.keys()
        manifest = make_manifest(number, 4, specs, BUCKET_BYTES, verify=True)
        received = [
            asyncio.to_thread(receive, replace(sources[rank], receiver=i), manifest)
            for rank, count in num_receivers.items()
            for i in range(count)
        ]
        sent, *received = await asyncio.gather(pool.send_weights(manifest, 60.0), *received)
        assert len(sent) == len(specs)
        assert received == [sent] * len(received)
        return sent

    def receive(source, manifest):
        with closing(build_receiver(source)) as receiver:
            return receiver.receive(manifest, RefusingSink(), 60.0)

    both = await publish(1, {0: 1, 1: 2})
    assert await publish(2, {1: 1}) == both
    assert await publish(3, {None: 1}) == both


async def published(pool, source, manifest, sink):
    """What the ranks and the one receiver say of a publish, errors too."""
    with closing(build_receiver(source)) as receiver:
        receiving = asyncio.to_thread(receiver.receive, manifest, sink, 60.0)
        return await asyncio.gather(pool.send_weights(manifest, 60.0), receiving, return_exceptions=True)


class RefusingSink:
    """Counts bytes, and refuses one tensor."""

    def __init__(self, refused=None):
        self.refused, self.received = refused, {}

    def write(self, spec, offset, data):
        if spec.name == self.refused:
            raise WeightTransferError(f"{spec.name} is refused")
        self.received[spec.name] = self.received.get(spec.name, 0) + data.numel()


@needs_megatron
@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_pipeline_stages_send_their_parts_and_an_error_of_one_ends_all(stages, transport):
    """The sender that still waits for receivers is closed, long before its deadline."""
    specs = await stages.weight_specs(START_S)
    config = WeightsConfig(bucket_bytes=BUCKET_BYTES, transport=transport)

    async def publish(publish_id, sink):
        return await published(stages, source, make_manifest(publish_id, 4, specs, BUCKET_BYTES), sink)

    for number, refused in enumerate((specs[0].name, specs[-1].name)):
        source = await opened(stages, config)
        assert len(source.parts) == 2
        started = time.monotonic()
        sent, received = await publish(2 * number + 1, RefusingSink(refused))
        assert isinstance(sent, WeightTransferError)
        assert f"{refused} is refused" in str(sent)
        assert isinstance(received, WeightTransferError)
        assert time.monotonic() - started < 40
        source = await opened(stages, config)
        sink = RefusingSink()
        sent, digest = await publish(2 * number + 2, sink)
        assert sent == digest
        assert len(sent) == len(specs)
        assert sink.received == {s.name: s.nbytes for s in specs}


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_a_snapshot_is_sent_while_a_step_trains(sending, lease, queue, transport, tmp_path):
    """Also to receivers that come during the step, and again with the same bytes."""
    specs = await sending.weight_specs(START_S)
    config = WeightsConfig(bucket_bytes=BUCKET_BYTES, transport=transport)
    numbers = itertools.count(1)

    async def publish():
        source = await opened(sending, config)
        manifest = make_manifest(next(numbers), 4, specs, BUCKET_BYTES, verify=True)
        sent, digest = await published(sending, source, manifest, RefusingSink())
        assert sent == digest
        return digest

    await sending.snapshot_weights()
    first = await publish()
    async with during_a_step(sending, queue, lease.plans(num_plans=2), tmp_path):
        assert [await publish(), await publish()] == [first, first]
    assert await publish() == first, "the copy is not changed by the step"
    await sending.snapshot_weights()
    assert await publish() != first


async def test_a_publish_that_nobody_receives_fails_in_time_and_leaves_the_ranks_in_step(pool, lease):
    specs = await pool.weight_specs(START_S)
    await opened(pool, WeightsConfig(bucket_bytes=BUCKET_BYTES))
    manifest = Manifest(2, 5, specs, plan_buckets(specs, BUCKET_BYTES))
    with pytest.raises(DeadlineExceeded):
        await pool.send_weights(manifest, 1.0)
    await pool.train_step(lease.plans(num_plans=2))


async def test_steps_publishes_and_pings_go_on_while_a_checkpoint_is_written(pool, lease, tmp_path):
    plans = lease.plans(num_plans=2)
    await pool.capture()
    expected = await pool.train_step(plans)
    await pool.capture()  # replaces the one before
    saving = asyncio.ensure_future(pool.save(blocked(tmp_path / "trainer", rank=1), START_S))
    for _ in range(2):
        after = await pool.train_step(plans)
        await pool.ping(5.0)
    assert after != expected
    specs = await pool.weight_specs(START_S)
    await opened(pool, WeightsConfig(bucket_bytes=BUCKET_BYTES))
    with pytest.raises(DeadlineExceeded):  # nobody receives, but both ranks walked the weights
        await pool.send_weights(Manifest(1, 4, specs, plan_buckets(specs, BUCKET_BYTES)), 0.5)
    assert not saving.done()
    unblock(tmp_path / "trainer", rank=1)
    with pytest.raises(StorageError, match="rank 1"):  # a pipe cannot hold a checkpoint
        await asyncio.wait_for(saving, 20)
    await pool.capture()  # and the ranks are whole
    first = await pool.train_step(plans)
    await pool.save(tmp_path / "again", START_S)
    await pool.load(tmp_path / "again")
    assert await pool.train_step(plans) == first


async def test_an_unusable_model_is_a_config_error_and_leaves_nothing_behind(queue, model_path, tmp_path):
    """Only the first rank finds out; the other one waits for its weights meanwhile."""
    broken = tmp_path / "broken"
    shutil.copytree(model_path, broken)
    (broken / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ConfigError, match="broken"):
        await TrainerPool.start(spec(broken, num_ranks=2), queue, 0, START_S)


async def test_a_gpu_that_torch_does_not_see_is_an_error_and_no_rank_trains_on_a_cpu_instead(queue, model_path):
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda(.|\n)*torch sees no CUDA device"):
        await TrainerPool.start(spec(model_path, num_ranks=1), queue, 1, START_S)


async def test_a_start_that_is_too_slow_is_named(queue, model_path):
    with pytest.raises(DeadlineExceeded, match="trainer rank 0"):
        await TrainerPool.start(spec(model_path, num_ranks=1), queue, 0, 0.2)


async def test_replies_are_bounded_and_typed(queue, tmp_path):
    with pytest.raises(RunFailed, match="budget spent"):
        await told(queue.fail)
    await told(queue.wait_for, tmp_path / "go")
    with pytest.raises(DeadlineExceeded, match="fetch of message queue"):
        await reply(queue.fetch.remote([]), timeout_s=0.3, call="fetch", process=MESSAGE_QUEUE)
    (tmp_path / "go").touch()
    await told(queue.wait_for, None)


async def test_a_step_that_is_late_names_the_rank_that_is_stopped(pool, lease):
    impatient = TrainerPool(spec("same ranks", step_timeout_s=1.5), [actor.handle for actor in pool._actors])
    plans = lease.plans(num_plans=2)
    stopped = pids_of(pool)[1]
    await impatient.ping(5.0)  # a rank that is stopped opens no line
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded, match="train_step of trainer rank 1") as raised:
            await impatient.train_step(plans)  # rank 0 is as late, waiting for it, but answers a ping
        assert str(raised.value.process) == "trainer rank 1"
    finally:
        os.kill(stopped, signal.SIGCONT)
    await pool.train_step(plans)  # the late step is done first


@pytest.fixture(scope="module")
def killed():
    """Ranks that a test has killed; the next one looks for what they left."""
    return []


@pytest.mark.slow
async def test_a_killed_rank_is_named_at_once_by_the_step_and_by_the_save(pool, lease, queue, tmp_path, killed):
    """The other rank still waits for its groups, and would for two minutes."""
    pids = pids_of(pool)
    killed += pids
    await opened(pool, WeightsConfig(bucket_bytes=BUCKET_BYTES))
    await pool.capture()
    await pool.save(tmp_path / "whole", START_S)
    await pool.capture()
    await told(queue.wait_for, tmp_path / "go")
    saving = asyncio.ensure_future(pool.save(blocked(tmp_path / "trainer", rank=1), START_S))
    step = asyncio.ensure_future(pool.train_step(lease.plans(num_plans=2)))
    await pool.ping(5.0)
    os.kill(pids[1], signal.SIGKILL)
    for call, waiting in (("train_step", step), ("save", saving)):
        with pytest.raises(ProcessDied, match=f"{call} of trainer rank 1") as raised:
            await waiting
        assert str(raised.value.process) == "trainer rank 1"
    (tmp_path / "go").touch()
    await told(queue.wait_for, None)
    with pytest.raises(ProcessDied, match="trainer rank 1"):
        await pool.ping(5.0)
    os.kill(pids[0], signal.SIGKILL)  # so that its shared memory is left behind
    await pool.stop()
    await pool.stop()
    await until(lambda: not is_alive(pids[0]))


@pytest.mark.slow
async def test_a_pool_after_the_crash_and_a_stopped_rank(queue, model_path, lease, tmp_path, killed):
    """One pool for both: the start is what costs."""
    pool = await TrainerPool.start(spec(model_path, collective_timeout_s=4), queue, 0, START_S)
    try:
        pids, plans = pids_of(pool), lease.plans(num_plans=2)
        await opened(pool, WeightsConfig(bucket_bytes=BUCKET_BYTES))
        assert not files_in((SHARED_MEMORY,), killed)
        await pool.capture()
        first = await pool.train_step(plans)
        await pool.save(tmp_path / "trainer", START_S)
        await pool.load(tmp_path / "trainer")
        assert await pool.train_step(plans) == first

        await pool.capture()
        saving = asyncio.ensure_future(pool.save(blocked(tmp_path / "blocked", rank=0), START_S))
        await pool.ping(5.0)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="train_step of trainer rank 1") as raised:
            await pool.train_step(plans)  # rank 0 fails first, in a collective
        assert str(raised.value.process) == "trainer rank 1"
        with pytest.raises(DeadlineExceeded, match="ping of trainer rank 1"):
            await pool.ping(1.0)
    finally:
        await asyncio.wait_for(pool.stop(), 60)
    with pytest.raises((ProcessDied, RuntimeError)):
        await asyncio.wait_for(saving, 20)
    await until(lambda: not any(map(is_alive, pids)))


def test_ranks_may_come_later_than_a_collective_may_take():
    store = host_store("127.0.0.1", 2, timedelta(seconds=0.2))
    peer = dist.TCPStore("127.0.0.1", store.port, 2, timeout=timedelta(seconds=0.2))
    with ThreadPoolExecutor() as threads:
        first = threads.submit(await_peers, store, 0, 2, 20)
        with pytest.raises(FutureTimeoutError):
            first.result(1.0)
        await_peers(peer, 1, 2, 20)
        first.result(20)
        with pytest.raises(DeadlineExceeded, match="rank 2, 3 did not come within"):
            await_peers(store, 1, 4, 0.1)


def pids_of(pool):
    return [ray.get(actor.handle.__ray_call__.remote(lambda _: os.getpid()), timeout=10) for actor in pool._actors]


def blocked(directory, rank):
    """A directory in which a rank cannot open its file before `unblock`."""
    directory.mkdir()
    os.mkfifo(directory / f"__{rank}_0.distcp")
    return directory


def unblock(directory, rank):
    """The rank's write goes on, and fails."""
    os.close(os.open(directory / f"__{rank}_0.distcp", os.O_RDONLY | os.O_NONBLOCK))


FULL = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 7) \
was 8.70GB used / 23.54GB limit (0.369602)
Object store memory usage: [- objects spillable: 0
Considered workers: [
Selected to kill: (Actor(7d8d): task name=A.__init__, required resources={}, pid=4000, actual memory \
used=4.10GB, worker ID=f71c)
"""


def test_a_rank_that_ray_has_killed_for_its_memory_is_told_in_one_line():
    with pytest.raises(ProcessDied) as told:
        _translate(ray.exceptions.OutOfMemoryError(FULL), Wait("train_step", trainer_rank(0), 1.0))
    found = str(told.value).splitlines()[1]
    assert found.endswith("was full: 8.70GB used / 23.54GB limit, actual memory used=4.10GB")
    assert "trainer.max_tokens_per_microbatch" in str(told.value)
