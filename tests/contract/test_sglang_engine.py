"""SGLang against the conformance suite of engines."""

from functools import partial

import pytest

from tests.engines import SharedEngine, sglang_engine
from tests.make import require_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

SIZES = {"max_running_requests": 32, "stream_interval": 1, "max_total_tokens": 1 << 15}


class TestSglangEngine(SharedEngine):
    deterministic = False
    scores = False
    build = staticmethod(partial(sglang_engine, real=True, **SIZES))


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
