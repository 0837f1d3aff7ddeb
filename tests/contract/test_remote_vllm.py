"""Engine remote on a real `vllm serve`, against the conformance suite of engines."""

import asyncio

import pytest

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError
from asyncrl.inference.remote.support import check_servers
from asyncrl.types import ModelFacts
from asyncrl_testing.random_model import write_random_qwen3
from tests.engines import EngineOfAServer, remote_engine
from tests.make import require_vllm
from tests.vllm_server import VllmServer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    require_vllm()
    directory = tmp_path_factory.mktemp("server")
    path = write_random_qwen3(directory / "model")
    server = VllmServer(path, directory / "log", "--skip-tokenizer-init", "--max-model-len", "512").start()
    yield server
    server.kill()


class TestRemoteEngine(EngineOfAServer):
    @staticmethod
    def build(server):
        return remote_engine(server, "m", real=True, max_num_seqs=32)


async def test_a_real_server_passes_the_check_before_a_run(server):
    remote = RemoteEngineConfig(urls=[server.url], max_model_len=512, max_num_seqs=32)
    rollout = RolloutConfig(engine="remote", num_replicas=1, remote=remote)
    await asyncio.to_thread(
        check_servers, rollout, ModelFacts("m", is_local=True, architecture="Qwen3ForCausalLM", vocab_size=128)
    )
    with pytest.raises(ConfigError, match="vocabulary 128, m has 256"):
        await asyncio.to_thread(check_servers, rollout, ModelFacts("m", is_local=True, vocab_size=256))
