"""`sglang.launch_server` against the suite of exact versions: its own loader reads the files of transport `disk`."""

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.inference.remote.engine import RemoteEngine
from asyncrl_testing.engine_client import within
from asyncrl_testing.random_model import write_random_qwen3
from asyncrl_testing.stamping_suite import StampingSuite
from tests.make import require_sglang
from tests.sglang_server import SglangServer

pytestmark = [pytest.mark.numerics, pytest.mark.sglang, pytest.mark.timeout(600)]


class TestUntiedAndStartedWithoutWeights(StampingSuite):
    transport = "disk"
    tied = False

    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def engine(cls, tmp_path_factory):
        require_sglang()
        directory = tmp_path_factory.mktemp("server")
        path = write_random_qwen3(directory / "model", tie_word_embeddings=False)
        flags = ("--context-length", "518", "--load-format", "dummy")
        server = SglangServer(path, directory / "log", *flags).start()
        settings = RemoteEngineConfig(urls=[server.url], max_model_len=512, max_num_seqs=8, weights="reload")
        engine = RemoteEngine(ModelConfig(path=str(path)), settings, load_real_weights=False)
        try:
            await within(engine.start(), 60.0)
            yield engine
            await within(engine.stop())
        finally:
            server.kill()
