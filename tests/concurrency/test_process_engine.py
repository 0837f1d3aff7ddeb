"""Pauses and resumes of an engine in other processes that are given up, or overtake each other."""

import asyncio
import contextlib

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import VllmEngineConfig
from asyncrl.errors import WeightTransferError
from asyncrl.inference.shared.process_engine import ProcessEngine
from asyncrl.types import Manifest
from asyncrl_testing.engine_client import within
from asyncrl_testing.local import NO_SOURCE

pytestmark = pytest.mark.asyncio


class Processes(ProcessEngine):
    """An engine without requests, whose processes answer when the test lets them."""

    package, key = "test", "test"

    def __init__(self):
        super().__init__(ModelConfig(path="m"), VllmEngineConfig(max_num_seqs=4), load_real_weights=True)
        self.answers = asyncio.Event()
        self.answers.set()
        self.samples = True
        self.loaded = 0

    async def _launch(self): ...

    async def _shut_down(self): ...

    def _death(self): ...

    def _vocab_size(self):
        return 8

    def _new_stream(self, request):
        raise NotImplementedError

    async def _sample(self, stream): ...

    async def _abort_inside(self, streams): ...

    async def _settle(self): ...

    async def _announce(self, version): ...

    async def _freeze_inside(self):
        await self._answer(samples=False)

    async def _unfreeze_inside(self):
        await self._answer(samples=True)

    async def _receive(self, manifest, source, timeout_s):
        assert not self.samples
        self.loaded += 1

    async def _answer(self, *, samples):
        await self.answers.wait()
        self.samples = samples


@pytest_asyncio.fixture
async def engine():
    engine = Processes()
    await engine.start()
    yield engine
    await engine.stop()


async def given_up(engine, call):
    """A call that its caller abandons before the processes have answered; they never do."""
    engine.answers.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await call
    engine.answers.set()


async def test_a_pause_that_was_given_up_lets_no_weights_in(engine):
    await given_up(engine, engine.pause("keep"))
    with pytest.raises(WeightTransferError, match="sampling"):
        await engine.load_weights(Manifest(1, 1, (), ()), NO_SOURCE, 1.0)
    await within(engine.pause("keep"))
    assert not engine.samples
    await engine.load_weights(Manifest(1, 1, (), ()), NO_SOURCE, 1.0)
    assert engine.loaded == 1


async def test_after_a_resume_that_was_given_up_a_pause_freezes_again(engine):
    await within(engine.pause("keep"))
    await given_up(engine, engine.resume())
    engine.samples = True  # it arrived all the same
    with pytest.raises(WeightTransferError, match="sampling"):
        await engine.load_weights(Manifest(1, 1, (), ()), NO_SOURCE, 1.0)
    await within(engine.pause("keep"))
    assert not engine.samples


async def test_after_a_pause_that_was_given_up_a_resume_reaches_the_processes(engine):
    await given_up(engine, engine.pause("keep"))
    engine.samples = False  # it arrived all the same
    await within(engine.resume())
    assert engine.samples


async def test_a_pause_that_comes_during_a_resume_has_the_last_word(engine):
    await within(engine.pause("keep"))
    engine.answers.clear()
    resuming = asyncio.create_task(engine.resume())
    await asyncio.sleep(0)
    pausing = asyncio.create_task(engine.pause("keep"))
    await asyncio.sleep(0)
    engine.answers.set()
    await within(asyncio.gather(resuming, pausing))
    assert not engine.samples
    assert not engine._queue._open
