"""SGLang against the conformance suite of engines."""

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import SglangEngineConfig
from asyncrl_testing.engine_client import within
from asyncrl_testing.engine_suite import EngineConformance
from asyncrl_testing.random_model import write_random_qwen3
from tests.make import require_sglang

pytestmark = [pytest.mark.contract, pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

START_S = 240.0


@pytest.fixture(scope="module")
def make_sglang_engine(tmp_path_factory):
    require_sglang()
    from asyncrl.inference.sglang.engine import SglangEngine

    path = write_random_qwen3(tmp_path_factory.mktemp("model"))
    settings = SglangEngineConfig(
        max_model_len=512, max_running_requests=32, stream_interval=1, max_total_tokens=1 << 15
    )

    async def make():
        engine = SglangEngine(ModelConfig(path=str(path)), settings, load_real_weights=True)
        await within(engine.start(), START_S)
        return engine

    return make


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_engine(make_sglang_engine):
    engine = await make_sglang_engine()
    yield engine
    await within(engine.stop())


class TestSglangEngine(EngineConformance):
    deterministic = False
    scores = False

    @pytest.fixture
    def make_engine(self, make_sglang_engine):
        return make_sglang_engine

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, shared_engine):
        yield shared_engine
        await shared_engine.resume()
        await shared_engine.abort(None)
        await shared_engine.commit(0)

    async def test_it_tells_the_size_of_its_cache(self, engine):
        """Otherwise rollout.sglang.kv_admission would do nothing."""
        assert engine._kv_capacity().tokens > 0


class Scheduled:
    """SGLang's record of a request, as far as it counts steps."""

    def __init__(self, prompt, prefilled, decoded, results):
        self.origin_input_ids, self.extend_end = [0] * prompt, prefilled
        self.decode_batch_idx, self.output_ids = decoded, [0] * results


@pytest.mark.parametrize(
    ("scheduled", "number"),
    [
        pytest.param(Scheduled(10, 4, 0, 0), -5, id="chunk of a prompt"),
        pytest.param(Scheduled(10, 10, 0, 0), 1, id="first"),
        pytest.param(Scheduled(10, 10, 1, 0), 2, id="a step ahead of its results"),
        pytest.param(Scheduled(10, 13, 0, 3), 4, id="again after a retraction"),
        pytest.param(Scheduled(10, 13, 2, 5), 6, id="goes on after a retraction"),
    ],
)
def test_min_tokens_counts_draws_and_not_results(scheduled, number):
    require_sglang()
    import torch

    from asyncrl.inference.sglang.logit_filter import LogitFilter

    for at_least, barred in ((number - 1, False), (number, True)):
        filters = {"min_tokens": at_least, "barred": [3], "__req__": scheduled}
        logits = LogitFilter()(torch.zeros(1, 8), [filters])
        assert bool(logits[0, 3].isinf()) == barred
