"""Every engine that runs on any machine, and the fake, against the conformance suite of engines."""

import os
import sys

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.inference.cpu_time import DECODE_NICENESS
from asyncrl.serving.run_server import NICENESS
from asyncrl_testing.engine_suite import EngineConformance
from asyncrl_testing.fake_engine import FakeEngine, FakeScript

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


class TestFakeEngine(EngineConformance):
    models_text = False
    records = True

    @pytest.fixture
    def make_engine(self):
        async def make():
            engine = FakeEngine(FakeScript(tick_s=0.0))
            await engine.start()
            return engine

        return make

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, make_engine):
        engine = await make_engine()
        yield engine
        await engine.stop()


@pytest.fixture(scope="module")
def make_torch_engine(tmp_path_factory):
    from asyncrl.inference.torch_engine.engine import TorchEngine
    from asyncrl_testing.random_model import write_random_qwen3

    path = write_random_qwen3(tmp_path_factory.mktemp("model"))

    async def make():
        settings = TorchEngineConfig(num_slots=32, chunk_tokens=16, device="cpu")
        engine = TorchEngine(ModelConfig(path=str(path)), settings, load_real_weights=True)
        await engine.start()
        return engine

    return make


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_torch_engine(make_torch_engine):
    engine = await make_torch_engine()
    yield engine
    await engine.stop()


class TestTorchEngine(EngineConformance):
    @pytest.fixture
    def make_engine(self, make_torch_engine):
        return make_torch_engine

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, shared_torch_engine):
        yield shared_torch_engine
        await shared_torch_engine.resume()
        await shared_torch_engine.abort(None)
        await shared_torch_engine.commit(0)

    @pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has the priority of its process")
    async def test_the_decode_thread_alone_leaves_others_the_cores_first(self, engine):
        own, decode = (os.getpriority(os.PRIO_PROCESS, number) for number in (0, engine._thread.native_id))
        assert decode == min(19, own + DECODE_NICENESS)
        assert 0 < DECODE_NICENESS < NICENESS, "the server of a run stays below"
