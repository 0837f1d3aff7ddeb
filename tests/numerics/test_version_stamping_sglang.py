"""SGLang against the suite of exact versions: its scheduler is another process, reached through the protocol alone."""

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import SglangEngineConfig
from asyncrl_testing.engine_client import within
from asyncrl_testing.random_model import write_random_qwen3
from asyncrl_testing.stamping_suite import StampingSuite
from tests.make import require_sglang

pytestmark = [pytest.mark.numerics, pytest.mark.sglang]

START_S = 240.0


class SglangCase(StampingSuite):
    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def engine(cls, tmp_path_factory):
        require_sglang()
        from asyncrl.inference.sglang.engine import SglangEngine

        path = write_random_qwen3(tmp_path_factory.mktemp("model"), tie_word_embeddings=cls.tied)
        settings = SglangEngineConfig(
            max_model_len=512, max_running_requests=8, stream_interval=1, max_total_tokens=1 << 14
        )
        engine = SglangEngine(ModelConfig(path=str(path)), settings, load_real_weights=False)
        await within(engine.start(), START_S)
        yield engine
        await within(engine.stop())


class TestSglangTied(SglangCase):
    tied = True


@pytest.mark.slow
class TestSglangUntied(SglangCase):
    tied = False
    transport = "collective"
