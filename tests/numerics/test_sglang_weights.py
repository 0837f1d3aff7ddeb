"""SGLang against the suite of published weights."""

import pytest

from asyncrl.errors import WeightTransferError
from asyncrl_testing.engine_client import within
from asyncrl_testing.random_model import random_qwen3, write_random_qwen3
from asyncrl_testing.served_weights_suite import ServedWeightsConformance, publish
from tests.engines import running, sglang_engine, started

pytestmark = pytest.mark.sglang


SIZES = {"max_running_requests": 16, "stream_interval": 1, "max_total_tokens": 1 << 14}


class TestSglangServesWhatIsPublished(ServedWeightsConformance):
    records_experts = True

    @pytest.fixture(scope="class")
    @classmethod
    def make_engine(cls):
        def make(path):
            has_experts = "num_experts" in (path / "config.json").read_text()
            return started(sglang_engine(path, record_experts=has_experts, **SIZES))

        return make

    async def test_published_weights_have_the_checksums_of_loaded_ones(self, engine, link, tmp_path):
        """By SGLang's own count, also after a publish that was refused in the middle."""
        wanted, other = random_qwen3(seed=40), random_qwen3(seed=41)
        path = write_random_qwen3(tmp_path / "model", seed=40)
        async with running(sglang_engine(path, real=True, **SIZES)) as loaded:
            expected = await within(loaded.checksums())
        assert len(expected[0]) > 10
        await publish(engine, link, wanted.named_parameters(), 50)
        assert await within(engine.checksums()) == expected
        await publish(engine, link, other.named_parameters(), 51)
        (ours,) = await within(engine.checksums())
        assert ours.keys() == expected[0].keys()
        assert all(ours[name] != expected[0][name] for name in ours if name.endswith("proj.weight"))
        with pytest.raises(WeightTransferError):
            await publish(engine, link, list(wanted.named_parameters())[:-3], 52)
        await publish(engine, link, wanted.named_parameters(), 53)
        assert await within(engine.checksums()) == expected
