"""`vllm serve` against the suite of exact versions: weights come through asyncrl's extension, or vLLM's own reload."""

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.inference.remote.engine import RemoteEngine
from asyncrl_testing.engine_client import within
from asyncrl_testing.random_model import write_random_qwen3
from asyncrl_testing.stamping_suite import BoundarySuite, StampingSuite
from tests.make import require_vllm
from tests.vllm_server import VllmServer

pytestmark = [pytest.mark.numerics, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]


class RemoteCase(BoundarySuite):
    weights = "extension"

    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def engine(cls, tmp_path_factory):
        require_vllm()
        directory = tmp_path_factory.mktemp("server")
        path = write_random_qwen3(directory / "model", tie_word_embeddings=cls.tied)
        flags = ("--skip-tokenizer-init", "--max-model-len", "512")
        server = VllmServer(path, directory / "log", *flags, extension=cls.weights == "extension").start()
        settings = RemoteEngineConfig(urls=[server.url], max_model_len=512, max_num_seqs=8, weights=cls.weights)
        engine = RemoteEngine(ModelConfig(path=str(path)), settings, load_real_weights=False)
        try:
            await within(engine.start(), 60.0)
            yield engine
            await within(engine.stop())
        finally:
            server.kill()


class TestServersWithTheExtension(RemoteCase, StampingSuite):
    tied = True
    transport = "disk"


class TestServersThatReceiveByGloo(RemoteCase):
    tied = False
    transport = "collective"


class TestServersThatReload(RemoteCase):
    tied = False
    transport = "disk"
    weights = "reload"
