"""Engine remote on a real `vllm serve`, against the conformance suite of engines."""

import asyncio

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError
from asyncrl.inference.remote.engine import RemoteEngine
from asyncrl.inference.remote.support import check_servers
from asyncrl.types import ModelFacts
from asyncrl_testing.engine_client import within
from asyncrl_testing.engine_suite import EngineConformance
from asyncrl_testing.random_model import write_random_qwen3
from tests.make import require_vllm
from tests.vllm_server import VllmServer

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    require_vllm()
    directory = tmp_path_factory.mktemp("server")
    path = write_random_qwen3(directory / "model")
    server = VllmServer(path, directory / "log", "--skip-tokenizer-init", "--max-model-len", "512").start()
    yield server
    server.kill()


def settings_of(server):
    return RemoteEngineConfig(urls=[server.url], max_model_len=512, max_num_seqs=32)


async def started(server):
    engine = RemoteEngine(ModelConfig(path="m"), settings_of(server), load_real_weights=True)
    await within(engine.start(), 60.0)
    return engine


class TestRemoteEngine(EngineConformance):
    """The server has one engine at a time: each test starts its own, which takes as long as a few calls."""

    deterministic = False
    scores = False

    @pytest.fixture
    def make_engine(self, server):
        async def make():
            return await started(server)

        return make

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, server):
        engine = await started(server)
        yield engine
        await within(engine.stop())


async def test_a_real_server_passes_the_check_before_a_run(server):
    rollout = RolloutConfig(engine="remote", num_replicas=1, remote=settings_of(server))
    await asyncio.to_thread(
        check_servers, rollout, ModelFacts("m", is_local=True, architecture="Qwen3ForCausalLM", vocab_size=128)
    )
    with pytest.raises(ConfigError, match="vocabulary 128, m has 256"):
        await asyncio.to_thread(check_servers, rollout, ModelFacts("m", is_local=True, vocab_size=256))
