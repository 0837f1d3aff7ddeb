"""What the embedded engine refuses, and how it dies: by name, and never in silence."""

import asyncio
import platform

import numpy as np
import pytest
import pytest_asyncio
import torch

from asyncrl.config.model import ModelConfig
from asyncrl.errors import GenerationError, WeightTransferError
from asyncrl.inference.torch_engine.runner import check_architecture
from asyncrl.types import GenerationRequest, IpcSource, Manifest, SamplingParams
from asyncrl_testing.engine_suite import Client, complete, make_request, within
from asyncrl_testing.random_model import write_random_qwen3
from tests.engines import running, torch_engine
from tests.make import begun

SOURCE = IpcSource(
    endpoint="ipc:///nowhere", path="none", host=platform.node(), bucket_bytes=4096, num_receivers=1, epoch=0
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    small = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 64}
    return write_random_qwen3(tmp_path_factory.mktemp("model"), **small)


def make_engine(path, **settings):
    return torch_engine(path, **{"real": True, "num_slots": 4, "max_model_len": 128} | settings)


@pytest_asyncio.fixture
async def engine(model_path):
    async with running(make_engine(model_path)) as engine:
        yield engine


def poison(engine):
    """A real fault: the weights become NaN, as after a diverged training step."""
    engine._runner.model.get_input_embeddings().weight.fill_(float("nan"))


async def test_a_dead_thread_fails_everything_that_waits_for_it(engine, caplog):
    clients = [Client(engine, make_request(max_tokens=100)) for _ in range(6)]  # two of them are queued
    await clients[0].first_tokens()
    drain = asyncio.create_task(engine.pause("drain"))
    poison(engine)
    for wait in (drain, *(client.task for client in clients)):
        with pytest.raises(GenerationError, match="not finite") as raised:
            await within(wait)
        assert isinstance(raised.value.__cause__, GenerationError)
    health = engine.health()
    assert (health.alive, health.running, health.waiting) == (False, 0, 0)
    assert "not finite" in health.detail
    with pytest.raises(GenerationError, match="not finite"):
        await complete(engine)
    with pytest.raises(GenerationError, match="not finite"):
        await within(engine.commit(1))
    await within(engine.abort(None))  # nothing is left to abort: not an error
    assert "the torch engine died" in caplog.text


async def test_a_death_is_explained_before_the_event_loop_hears_of_it(engine):
    client = Client(engine, make_request(max_tokens=100))
    await client.first_tokens()
    poison(engine)
    engine._thread.join(10)  # holds the event loop
    for call in (engine.pause("drain"), within(client.task)):
        with pytest.raises(GenerationError, match="not finite"):
            await call


async def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    engine = make_engine(tmp_path / "no-such-model")
    with pytest.raises(GenerationError, match="no-such-model"):
        await within(engine.start())
    assert not engine.health().alive
    await within(engine.stop())


async def test_without_a_version_nothing_is_sampled(model_path):
    async with running(make_engine(model_path, real=False)) as engine:
        client = Client(engine, make_request(max_tokens=8))
        await asyncio.sleep(0.05)
        assert (engine.health().version, engine.health().waiting, client.chunks) == (None, 1, [])
        await within(engine.commit(None))
        await asyncio.sleep(0.05)
        assert client.chunks == []
        await within(engine.commit(5))
        assert (await client.done()).versions == [5] * 8


async def test_calls_before_start_and_a_second_start_are_refused(model_path, engine):
    with pytest.raises(GenerationError, match="not been started"):
        await complete(make_engine(model_path))
    with pytest.raises(GenerationError, match="started before"):
        await engine.start()


@pytest.mark.parametrize(
    ("prompt", "sampling", "found"),
    [
        ([], {}, "shape"),
        ([1, 128], {}, "the model has 128"),
        ([-1], {}, "from -1"),
        ([1.5], {}, "float"),
        ([1], {"max_tokens": 0}, "max_tokens=0"),
        ([1] * 100, {"max_tokens": 29}, "100 prompt tokens"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_k": -1}, "top_k"),
    ],
)
async def test_a_request_that_would_break_the_loop_is_refused(engine, prompt, sampling, found):
    ids = np.array(prompt, dtype=np.float32 if 1.5 in prompt else np.int32)
    request = GenerationRequest("bad", ids, SamplingParams(**({"max_tokens": 8} | sampling)))
    with pytest.raises(GenerationError, match=found):
        await Client(engine, request).done()
    assert (await complete(engine, max_tokens=124)).finish_reasons == ["length"]


async def test_a_request_id_in_flight_is_refused(engine):
    request = make_request(max_tokens=100)
    first = Client(engine, request)
    await first.first_tokens()
    with pytest.raises(GenerationError, match="in flight"):
        await Client(engine, request).done()
    assert len((await first.done()).ids) == 100


async def test_chunks_have_the_configured_size(model_path):
    async with running(make_engine(model_path, chunk_tokens=7)) as engine:
        client = await complete(engine, max_tokens=16)
        assert [len(chunk.token_ids) for chunk in client.chunks] == [7, 7, 2]


async def test_weights_are_not_received_while_sampling(engine):
    with pytest.raises(WeightTransferError, match="pause"):
        await within(engine.load_weights(Manifest(1, 1, (), ()), SOURCE, 1.0))


async def test_a_resumed_response_does_not_wait_behind_those_that_have_no_token_yet(model_path):
    ended = []
    async with running(make_engine(model_path, num_slots=1)) as engine:
        await within(engine.pause("abort"))
        clients = [Client(engine, make_request(max_tokens=4, first_position=first)) for first in (0, 0, 9, 3)]
        for i, client in enumerate(clients):
            client.task.add_done_callback(lambda _, i=i: ended.append(i))
        await asyncio.sleep(0.1)
        await within(engine.resume())
        for client in clients:
            await client.done()
        assert ended == [2, 3, 0, 1]


async def test_resume_ends_a_drain_that_it_overtakes(engine):
    client = Client(engine, make_request(max_tokens=100))
    await client.first_tokens()
    drain = await begun(engine.pause("drain"))
    await within(engine.resume())
    with pytest.raises(GenerationError, match="resume"):
        await within(drain)
    assert (await client.done()).finish_reasons == ["length"]


@pytest.mark.parametrize("idle", [False, True])
async def test_an_engine_whose_event_loop_is_gone_ends_its_thread(model_path, idle):
    engines = []

    async def leave_behind():
        engine = make_engine(model_path)
        await engine.start()
        if not idle:
            Client(engine, make_request(max_tokens=100))
            await asyncio.sleep(0)
        engines.append(engine)

    await asyncio.to_thread(asyncio.run, leave_behind())
    await asyncio.to_thread(engines[0]._thread.join, 30)
    assert not engines[0]._thread.is_alive()


def test_attention_that_the_slots_cannot_do_is_refused_before_loading():
    from transformers import GPT2Config, MistralConfig, Qwen3Config

    check_architecture(MistralConfig(sliding_window=4096), 4096)
    check_architecture(Qwen3Config(use_sliding_window=False), 512)
    check_architecture(MistralConfig(sliding_window=256), 512)
    with pytest.raises(GenerationError, match="positions"):
        check_architecture(GPT2Config(n_positions=128), 512)
    with pytest.raises(GenerationError, match="chunked_attention"):
        check_architecture(Qwen3Config(num_hidden_layers=1, layer_types=["chunked_attention"]), 512)


def test_dummy_weights_follow_the_seed_and_leave_the_global_generator_alone(model_path):
    from asyncrl.inference.torch_engine.runner import load_model

    def embedding(seed):
        config = ModelConfig(path=str(model_path))
        model = load_model(config, torch.device("cpu"), real_weights=False, seed=seed)
        return model.get_input_embeddings().weight

    state = torch.random.get_rng_state()
    assert embedding(1).equal(embedding(1))
    assert not embedding(1).equal(embedding(2))
    assert torch.random.get_rng_state().equal(state)
