"""vLLM against the conformance suite of engines."""

import asyncio

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import VllmEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.inference.vllm import VllmEngine
from asyncrl_testing.engine_client import Client, make_request, within
from asyncrl_testing.engine_suite import EngineConformance
from asyncrl_testing.random_model import write_random_qwen3
from tests.make import require_vllm

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

START_S = 120.0


@pytest.fixture(scope="module")
def make_vllm_engine(tmp_path_factory):
    require_vllm()
    path = write_random_qwen3(tmp_path_factory.mktemp("model"))
    settings = VllmEngineConfig(max_model_len=512, max_num_seqs=32, kv_cache_memory_bytes=64 << 20, enforce_eager=True)

    async def make():
        engine = VllmEngine(ModelConfig(path=str(path)), settings, load_real_weights=True)
        await within(engine.start(), START_S)
        return engine

    return make


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_engine(make_vllm_engine):
    engine = await make_vllm_engine()
    yield engine
    await within(engine.stop())


class TestVllmEngine(EngineConformance):
    deterministic = False
    stream_interval = VllmEngineConfig().stream_interval

    @pytest.fixture
    def make_engine(self, make_vllm_engine):
        return make_vllm_engine

    async def test_sleep_is_refused_where_it_was_not_asked_for(self, engine):
        for call in (engine.sleep(), engine.wake_up()):
            with pytest.raises(GenerationError, match="enable_sleep_mode"):
                await within(call)

    async def test_requests_that_had_no_token_begin_anew_after_a_pause(self, engine):
        """They would start with the weights that came meanwhile, and the prefix cache of those before."""
        clients = [Client(engine, make_request(prompt=(7,) * 200, max_tokens=4, seed=i)) for i in range(40)]
        while engine.health().running == 0:
            await asyncio.sleep(0)
        await within(engine.pause("keep"))
        assert engine.health().running == sum(0 < len(c.ids) < 4 for c in clients)
        await within(engine.commit(3))
        await within(engine.resume())
        for client in clients:
            await client.done()
            assert (len(client.ids), client.finish_reasons) == (4, ["length"])
            assert client.versions == sorted(client.versions)

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, shared_engine):
        yield shared_engine
        await shared_engine.resume()
        await shared_engine.abort(None)
        await shared_engine.commit(0)
