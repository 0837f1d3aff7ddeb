"""Conformance suite of engines: effects of pauses and commits on requests, on which a publish relies."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from asyncrl.inference.engine import InferenceEngine
from asyncrl_testing.engine_client import Client, again_if_late, complete, make_request, settle, within


class PauseConformance:
    deterministic: ClassVar[bool] = True
    """Same request, same weights, same tokens, whatever else runs."""
    long_response: ClassVar[int] = 400
    """A budget that is not used up while a test interrupts it."""
    stream_interval: ClassVar[int] = 1
    """Tokens that the engine streams together: one less may be sampled and not handed over while a request runs."""

    @again_if_late
    async def test_pause_abort_ends_what_runs_and_holds_what_comes(self, engine: InferenceEngine) -> None:
        running = Client(engine, make_request(max_tokens=self.long_response))
        await running.first_tokens()
        await within(engine.pause("abort"))
        (await running.done()).require_unfinished()
        assert running.finish_reasons == ["abort"]
        held = Client(engine, make_request())
        await settle()
        assert held.chunks == []
        await within(engine.pause("abort"))
        await settle()
        assert held.chunks == []
        await within(engine.resume())
        assert (await held.done()).finish_reasons == ["length"]

    @again_if_late
    async def test_pause_keep_freezes_and_goes_on(self, engine: InferenceEngine) -> None:
        whole = (await complete(engine, max_tokens=self.long_response)).ids
        client = Client(engine, make_request(max_tokens=self.long_response))
        await client.first_tokens()
        await within(engine.pause("keep"))
        await within(engine.pause("keep"))
        await asyncio.sleep(0)  # the consumer takes what has been handed over
        client.require_unfinished()
        frozen = len(client.ids)
        await settle()
        assert len(client.ids) == frozen < self.long_response
        await within(engine.resume())
        await within(engine.resume())
        await client.done()
        assert client.finish_reasons == ["length"]
        if self.deterministic:
            assert client.ids == whole

    async def test_pause_drain_finishes_what_runs(self, engine: InferenceEngine) -> None:
        running = Client(engine, make_request(max_tokens=64))
        await running.first_tokens()
        pausing = asyncio.create_task(engine.pause("drain"))
        await asyncio.sleep(0)
        late = Client(engine, make_request())
        await within(pausing)
        await running.done()
        assert (running.finish_reasons, len(running.ids)) == (["length"], 64)
        await settle()
        assert late.chunks == []
        await within(engine.resume())
        assert (await late.done()).finish_reasons == ["length"]

    @again_if_late
    async def test_pause_drain_ends_when_what_runs_is_aborted(self, engine: InferenceEngine) -> None:
        running = Client(engine, make_request(max_tokens=self.long_response))
        await running.first_tokens()
        pausing = asyncio.create_task(engine.pause("drain"))
        await asyncio.sleep(0)
        await within(engine.abort([running.request.request_id]))
        await within(pausing, 10.0)
        (await running.done()).require_unfinished()
        assert running.finish_reasons == ["abort"]

    async def test_pause_drain_of_an_idle_engine_returns(self, engine: InferenceEngine) -> None:
        await within(engine.pause("drain"), 5.0)
        await within(engine.pause("drain"), 5.0)

    @again_if_late
    async def test_a_commit_in_mid_generation_splits_exactly_at_the_swap(self, engine: InferenceEngine) -> None:
        version = engine.health().version
        assert version is not None
        clients = [Client(engine, make_request(max_tokens=self.long_response, seed=i)) for i in range(3)]
        for client in clients:
            await client.first_tokens()
        await within(engine.pause("keep"))
        await asyncio.sleep(0)
        for client in clients:
            client.require_unfinished()
        before = [len(client.ids) for client in clients]
        await within(engine.commit(version + 1))
        await within(engine.commit(None))
        await within(engine.resume())
        for client, count in zip(clients, before, strict=True):
            await client.done()
            old = client.versions.count(version)
            # Tokens sampled but not yet streamed at the pause still belong to the old version.
            assert count <= old < count + self.stream_interval
            assert client.versions == [version] * old + [version + 1] * (self.long_response - old)
        assert engine.health().version == version + 1
        await within(engine.commit(version))

    async def test_health_tells_the_version_of_each_commit(self, engine: InferenceEngine) -> None:
        for version in (1, None, 2, 5):
            await within(engine.pause("keep"))
            before = engine.health().version
            await within(engine.commit(version))
            assert engine.health().version == (before if version is None else version)
            await within(engine.resume())
            assert set((await complete(engine, max_tokens=2)).versions) == {engine.health().version}
        await within(engine.commit(0))

    @again_if_late
    async def test_a_commit_without_a_pause_stamps_later_tokens_only(self, engine: InferenceEngine) -> None:
        client = Client(engine, make_request(max_tokens=self.long_response))
        await client.first_tokens()
        await within(engine.commit(7))
        await client.done()
        await within(engine.commit(0))
        if set(client.versions) == {0}:
            client.require_unfinished()
        assert client.versions == sorted(client.versions)
        assert set(client.versions) == {0, 7}
