"""Conformance suite of engines that release their memory: `SleepingEngine` and its fake.

A test module subclasses `SleepConformance` and gives the fixture `engine`: started, idle, not paused, at version 0.
"""

from __future__ import annotations

import pytest

from asyncrl.errors import GenerationError
from asyncrl.inference.engine import InferenceEngine, SleepingEngine
from asyncrl_testing.engine_client import Client, complete, make_request, settle, within

NOT_EMPTY = "not paused and empty"


class _Sleeper(InferenceEngine, SleepingEngine):
    """Both protocols, for the type checker."""


class SleepConformance:
    async def test_it_sleeps_only_paused_and_empty(self, engine: _Sleeper) -> None:
        assert isinstance(engine, SleepingEngine)
        with pytest.raises(GenerationError, match=NOT_EMPTY):
            await within(engine.sleep())
        running = Client(engine, make_request(max_tokens=400))
        await running.first_tokens()
        await within(engine.pause("keep"))
        with pytest.raises(GenerationError, match=NOT_EMPTY):
            await within(engine.sleep())
        await within(engine.abort(None))
        await running.done()
        await within(engine.sleep())

    async def test_it_samples_nothing_until_a_version_is_committed(self, engine: _Sleeper) -> None:
        await within(engine.pause("abort"))
        await within(engine.sleep())
        await within(engine.sleep())
        assert engine.health().version is None
        waiting = Client(engine, make_request(max_tokens=8))
        await within(engine.wake_up())
        await within(engine.wake_up())
        await within(engine.resume())
        await settle()
        assert waiting.chunks == []
        await within(engine.commit(3))
        await waiting.done()
        assert (waiting.finish_reasons, waiting.versions) == (["length"], [3] * 8)

    async def test_it_wakes_in_parts_and_resumes_when_all_of_it_is_awake(self, engine: _Sleeper) -> None:
        await within(engine.pause("abort"))
        await within(engine.sleep())
        for part in ("weights", "kv_cache"):
            with pytest.raises(GenerationError, match=part):
                await within(engine.resume())
            await within(engine.wake_up([part]))
        await within(engine.resume())
        await within(engine.commit(1))
        assert len((await complete(engine, max_tokens=5)).ids) == 5
