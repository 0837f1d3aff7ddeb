"""Every engine that runs on any machine, and the fake, against the conformance suite of engines."""

import os
import sys
from functools import partial

import pytest
import pytest_asyncio

from asyncrl.inference.cpu_time import DECODE_NICENESS, SERVER_NICENESS
from asyncrl_testing.engine_suite import EngineConformance
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from tests.engines import SharedEngine, torch_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")


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


class TestTorchEngine(SharedEngine):
    build = staticmethod(partial(torch_engine, real=True, num_slots=32, chunk_tokens=16))

    @pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has the priority of its process")
    async def test_the_decode_thread_alone_leaves_others_the_cores_first(self, engine):
        own, decode = (os.getpriority(os.PRIO_PROCESS, number) for number in (0, engine._thread.native_id))
        assert decode == min(19, own + DECODE_NICENESS)
        assert 0 < DECODE_NICENESS < SERVER_NICENESS, "the server of a run stays below"
