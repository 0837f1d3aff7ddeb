"""Engines that give their memory back: what they promise, what really goes, and a replica that wakes by a publish."""

import asyncio

import psutil
import pytest
import pytest_asyncio
import torch

from asyncrl.errors import GenerationError, WeightTransferError
from asyncrl.inference.torch_engine.runner import ReleasedMemory
from asyncrl.types import Manifest, SamplingParams
from asyncrl_testing.engine_client import Client, complete, make_request, within
from asyncrl_testing.engine_sleep_suite import SleepConformance
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.local import NO_SOURCE
from asyncrl_testing.publishing import Publisher
from asyncrl_testing.random_model import greedy_continuation, random_qwen3, write_random_qwen3
from tests.engines import running, torch_engine

MIB = 1 << 20


class TestFakeEngine(SleepConformance):
    @pytest_asyncio.fixture
    async def engine(self):
        async with running(FakeEngine(FakeScript())) as engine:
            yield engine


def are_gone(tensors):
    """True when the system has the pages of these tensors: they read as 0. Parts of pages at their ends stay."""
    return all(torch.count_nonzero(t) * t.element_size() < 2 * 4096 for t in tensors)


SIZES = {"num_slots": 8, "max_model_len": 512}


class TestTorchEngine(SleepConformance):
    @pytest_asyncio.fixture
    async def engine(self, model_path):
        async with running(torch_engine(model_path, **SIZES)) as engine:
            await engine.commit(0)
            yield engine

    async def test_nothing_is_received_into_weights_that_sleep(self, engine):
        await engine.pause("abort")
        await within(engine.sleep())
        with pytest.raises(WeightTransferError, match="the weights sleep"):
            await engine.load_weights(Manifest(1, 1, (), ()), NO_SOURCE, 5.0)
        with pytest.raises(GenerationError, match="no part"):
            await engine.wake_up(["optimizer"])
        await within(engine.wake_up(["weights"]))
        with pytest.raises(GenerationError, match="in part"):
            await engine.sleep()


@pytest_asyncio.fixture
async def large(model_path):
    """256 MiB of KV cache: 8 tensors of 64 slots x 2 heads x 2048 tokens x 32 float32."""
    wide = model_path.parent / "wide"
    write_random_qwen3(wide, max_position_embeddings=2048)
    async with running(torch_engine(wide, num_slots=64, max_model_len=2048)) as engine:
        yield engine


async def test_a_sleeping_engine_gives_its_memory_back_to_the_system(large):
    tensors = large._runner._cache.tensors
    cache_bytes = sum(t.untyped_storage().nbytes() for t in tensors)
    assert cache_bytes == 256 * MIB
    parameters = list(large._runner.model.parameters())
    await large.pause("abort")
    process = psutil.Process()
    awake = process.memory_info().rss
    await within(large.sleep())
    asleep = process.memory_info().rss
    assert awake - asleep > 0.9 * cache_bytes
    assert are_gone(parameters)
    await within(large.wake_up(["weights"]))
    assert process.memory_info().rss - asleep < 0.1 * cache_bytes
    await within(large.wake_up(["kv_cache"]))
    assert process.memory_info().rss - asleep > 0.9 * cache_bytes


def test_tied_weights_are_released_once_and_views_of_them_live_on():
    whole = torch.arange(12.0)
    view, other = whole.view(3, 4), torch.ones(2)
    released = ReleasedMemory([whole, view, other])
    assert released.nbytes == 12 * 4 + 8
    released.restore()
    assert view.sum() == 0
    whole[5] = 7
    assert view[1, 1] == 7


def test_memory_that_numpy_has_seen_is_released_too():
    """As in a transfer: torch does not let its storage shrink any more."""
    tensor = torch.ones(4 * MIB)
    seen = tensor.numpy()
    released = ReleasedMemory([tensor[: 2 * MIB]])
    assert are_gone([tensor])
    released.restore()
    assert not seen.any()


def test_nothing_beside_the_memory_is_touched():
    """What is released begins and ends within a page that others use too."""
    whole = torch.ones(1 << 16)
    part = torch.frombuffer(memoryview(whole.numpy())[100:-100], dtype=torch.float32)
    ReleasedMemory([part]).restore()
    assert not part.any()
    assert whole[:100].all()
    assert whole[-100:].all()


@pytest_asyncio.fixture
async def publisher(model_path):
    async with running(torch_engine(model_path, **SIZES)) as engine:
        publisher = Publisher(engine)
        yield publisher
        await publisher.close()


async def test_a_publish_wakes_a_replica_with_exactly_the_new_weights(publisher):
    prompt = [5, 6, 7, 8, 9]
    for seed in (1, 2, 3):
        model = random_qwen3(seed=seed)
        await publisher.publish(model, seed, "abort")
        client = await complete(publisher.engine, prompt=prompt, max_tokens=24, temperature=0.0)
        assert client.ids == greedy_continuation(model, prompt, 24)
        await within(publisher.replica.sleep())
        await within(publisher.replica.sleep())
        assert are_gone(publisher.engine._runner.model.parameters())
    stats = await publisher.replica.stats()
    assert stats.asleep_s > 0
    assert stats.waking_s > 0


async def test_a_request_goes_on_under_the_weights_that_follow_the_sleep(publisher):
    await publisher.publish(random_qwen3(seed=1), 1, "abort")
    client = publisher.client()
    sampling = SamplingParams(max_tokens=300, temperature=1.0)
    asked = asyncio.create_task(client.generate(make_request().prompt_ids, sampling, session_id="one"))
    await publisher.sampled(40)
    await within(publisher.replica.sleep())
    await asyncio.sleep(0.05)
    assert not asked.done()
    generated = publisher.engine.health().generated_tokens
    await asyncio.sleep(0.05)
    assert publisher.engine.health().generated_tokens == generated
    await publisher.publish(random_qwen3(seed=2), 2, "abort")
    answer = await within(asked)
    assert len(answer.token_ids) == 300
    assert [s.version for s in answer.segments] == [1, 2]
    assert answer.interruptions == 1
    await client.close()


async def test_a_publish_that_fails_leaves_the_replica_asleep_or_closed_and_the_next_one_wakes_it(publisher):
    await publisher.publish(random_qwen3(seed=1), 1, "abort")
    await within(publisher.replica.sleep())
    await publisher.publish_broken(random_qwen3(seed=2), 2, "abort")
    waiting = Client(publisher.engine, make_request(max_tokens=4))
    await asyncio.sleep(0.05)
    assert waiting.chunks == []
    await publisher.replica.reset(5, 1)  # a new training side follows, and takes its turn first
    await within(publisher.replica.sleep())
    assert are_gone(publisher.engine._runner.model.parameters())
    waiting.task.cancel()
