"""vLLM against the suite of exact versions: EngineCore is another process, reached through the protocol alone."""

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import VllmEngineConfig
from asyncrl.inference.vllm.engine import VllmEngine
from asyncrl_testing.engine_client import within
from asyncrl_testing.random_model import write_random_qwen3
from asyncrl_testing.stamping_suite import StampingSuite
from tests.make import require_vllm

pytestmark = [pytest.mark.numerics, pytest.mark.usefixtures("one_thread")]

START_S = 240.0


class VllmCase(StampingSuite):
    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def engine(cls, tmp_path_factory):
        require_vllm()
        path = write_random_qwen3(tmp_path_factory.mktemp("model"), tie_word_embeddings=cls.tied)
        settings = VllmEngineConfig(
            max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=64 << 20, enforce_eager=True
        )
        engine = VllmEngine(ModelConfig(path=str(path)), settings, load_real_weights=False)
        await within(engine.start(), START_S)
        yield engine
        await within(engine.stop())


class TestVllmTied(VllmCase):
    tied = True


@pytest.mark.slow
class TestVllmUntied(VllmCase):
    tied = False
