"""Engine remote on a real `sglang.launch_server`, against the conformance suite of engines."""

import asyncio

import pytest

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError
from asyncrl.inference.remote.support import check_servers
from asyncrl.types import ModelFacts
from asyncrl_testing.engine_client import within
from asyncrl_testing.random_model import write_random_qwen3
from tests.engines import EngineOfAServer, remote_engine
from tests.make import require_sglang
from tests.sglang_server import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


SETTINGS = {"max_num_seqs": 32, "weights": "reload"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    require_sglang()
    directory = tmp_path_factory.mktemp("server")
    model = write_random_qwen3(directory / "model")
    server = SglangServer(model, directory / "log", "--context-length", "518").start()
    yield server
    server.kill()


class TestRemoteEngine(EngineOfAServer):
    @staticmethod
    def build(server):
        return remote_engine(server, server.model, real=True, **SETTINGS)


async def test_a_real_server_passes_the_check_before_a_run(server):
    async def check(facts, **changes):
        remote = RemoteEngineConfig(urls=[server.url], **{"max_model_len": 512, **SETTINGS, **changes})
        rollout = RolloutConfig(engine="remote", num_replicas=1, remote=remote)
        await asyncio.to_thread(check_servers, rollout, facts)

    same = ModelFacts("m", is_local=True, architecture="Qwen3ForCausalLM", vocab_size=128)
    await check(same)
    with pytest.raises(ConfigError, match="architecture Qwen3ForCausalLM, m has LlamaForCausalLM"):
        await check(ModelFacts("m", is_local=True, architecture="LlamaForCausalLM"))
    with pytest.raises(ConfigError, match="--context-length 519"):
        await check(same, max_model_len=513)
    with pytest.raises(ConfigError, match="weights=reload"):
        await check(same, weights="extension")


async def test_another_vocabulary_is_noticed_at_the_start(server, tmp_path):
    other = write_random_qwen3(tmp_path / "other", vocab_size=160)
    engine = remote_engine(server, other, real=True, **SETTINGS)
    with pytest.raises(ConfigError, match="from 128 tokens, the model has 160"):
        await within(engine.start(), 60.0)
    await within(engine.stop())
