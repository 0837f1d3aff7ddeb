"""The embedded engine and the fake against the suite of exact versions."""

import asyncio
from contextlib import closing
from functools import partial

import pytest
import pytest_asyncio
import torch

from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.transports import build_receiver
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.marked_model import NUM_MARKS, mark_of, marked_qwen3
from asyncrl_testing.random_model import write_random_qwen3
from asyncrl_testing.stamping_suite import BoundarySuite, StampingSuite
from tests.engines import running, torch_engine

pytestmark = pytest.mark.usefixtures("one_thread")


class EngineCase(BoundarySuite):
    """Of the engine that `build` makes of a path."""

    build = staticmethod(partial(torch_engine, num_slots=8, chunk_tokens=16))

    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def engine(cls, tmp_path_factory):
        path = write_random_qwen3(tmp_path_factory.mktemp("model"), tie_word_embeddings=cls.tied)
        async with running(cls.build(path)) as engine:
            yield engine


class TestTorchEngineTied(EngineCase, StampingSuite):
    tied = True


@pytest.mark.slow
class TestTorchEngineUntied(EngineCase, StampingSuite):
    tied = False


@pytest.mark.slow
class TestTorchEngineCollective(EngineCase):
    """The other transport of live weights, with the stamps alone."""

    transport = "collective"


async def receive_for_real(manifest, source, timeout_s):
    """Takes a publish over its transport and forgets it."""

    def receive():
        with closing(build_receiver(source)) as receiver:
            return receiver.receive(manifest, AssemblingSink(lambda name, tensor: None), timeout_s)

    return await asyncio.to_thread(receive)


class TestFakeEngine(BoundarySuite):
    """The fake has no weights: its tokens tell the version that was committed."""

    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def engine(cls):
        engine = FakeEngine(FakeScript(num_slots=8, tick_s=0.0005, start_version=None, load_hook=receive_for_real))
        await engine.start()
        yield engine
        await engine.stop()

    def mark_of(self, token):
        return token // 1_000_000 % NUM_MARKS

    test_a_publish_without_a_version_leaves_the_stamps = None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mark", range(NUM_MARKS))
def test_marked_weights_write_their_mark_in_every_context(mark, tied):
    model = marked_qwen3(mark, tied=tied)
    contexts = torch.randint(0, 128, (8, 200), generator=torch.Generator().manual_seed(mark))
    contexts[0] = 5
    contexts[1] = torch.arange(200) % 128
    with torch.inference_mode():
        logits = model(contexts).logits
    own = torch.tensor([mark_of(token) == mark for token in range(128)])
    behind = logits[..., own].min(-1).values - logits[..., ~own].max(-1).values
    assert behind.min() > 80
    assert len(set(logits.argmax(-1).flatten().tolist())) >= 8
