"""SGLang against the suite of published weights."""

import pytest

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import SglangEngineConfig
from asyncrl_testing.engine_client import within
from asyncrl_testing.served_weights_suite import ServedWeightsConformance
from tests.make import require_sglang

pytestmark = [pytest.mark.numerics, pytest.mark.sglang]


class TestSglangServesWhatIsPublished(ServedWeightsConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def make_engine(cls):
        require_sglang()
        from asyncrl.inference.sglang import SglangEngine

        async def make(path):
            settings = SglangEngineConfig(
                max_model_len=512, max_running_requests=16, stream_interval=1, max_total_tokens=1 << 14
            )
            engine = SglangEngine(ModelConfig(path=str(path)), settings, load_real_weights=False)
            await within(engine.start(), 240.0)
            return engine

        return make
