"""Exact versions: the suite that every inference engine which takes publishes must pass.

A test class derives from `StampingSuite` and gives one fixture: `engine`, started, of a model written by
`write_random_qwen3(directory, tie_word_embeddings=cls.tied)`, in float32, for at least 512 tokens a request and with
fewer slots than twelve. The class runs in one event loop; make the fixture once per class:

    class TestMyEngine(StampingSuite):
        tied = True

        @pytest_asyncio.fixture(loop_scope="class", scope="class")
        @classmethod
        async def engine(cls, tmp_path_factory): ...

The suite sees nothing but the `InferenceEngine` protocol: the engine may live in other processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import pytest_asyncio

from asyncrl.errors import WeightTransferError
from asyncrl.inference.engine import InferenceEngine
from asyncrl.types import Generation, PauseMode, SamplingParams
from asyncrl_testing.engine_client import Client, make_request, settle, within
from asyncrl_testing.marked_model import NUM_MARKS, mark_of, marked_qwen3
from asyncrl_testing.publishing import Publisher
from asyncrl_testing.weight_swap_suite import WeightSwapSuite

_TRIES = 5
"""A busy machine may let a response end before the publish that is to cut it."""
_MODES: tuple[PauseMode, ...] = ("abort", "keep", "drain")


@pytest.mark.asyncio(loop_scope="class")
class BoundarySuite:
    """Weights that sign every token: a segment must end exactly where the signature changes.

    Version v is published with the weights of mark v modulo eight.
    """

    tied: ClassVar[bool] = True
    """Whether the engine's model ties its embeddings."""
    transport: ClassVar[str] = "ipc"

    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def shared_publisher(cls, engine: InferenceEngine) -> AsyncIterator[Publisher]:
        publisher = Publisher(engine, cls.transport)
        yield publisher
        await publisher.close()

    @pytest_asyncio.fixture(loop_scope="class")
    async def publisher(self, shared_publisher: Publisher) -> AsyncIterator[Publisher]:
        yield shared_publisher
        await shared_publisher.settle()

    @pytest.fixture(scope="class")
    @classmethod
    def marked(cls) -> list[Any]:
        """The model of each mark."""
        return [marked_qwen3(mark, tied=cls.tied) for mark in range(NUM_MARKS)]

    def mark_of(self, token: int) -> int:
        return mark_of(token)

    @pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("mode", ["abort", "keep"])
    async def test_publishes_in_a_row_cut_every_response_exactly(
        self, publisher: Publisher, marked: list[Any], mode: PauseMode, temperature: float
    ) -> None:
        """Twelve responses at different places, six publishes, every other one staged where the engine can; requests
        that were aborted resume by themselves."""
        first = last = await self._publish_next(publisher, marked, mode)
        client = publisher.client()
        sampling = SamplingParams(temperature=temperature, max_tokens=260)
        running = [asyncio.create_task(client.generate(p, sampling, seed=i)) for i, p in enumerate(_prompts(6))]
        for number in range(6):
            await publisher.sampled(60)
            last = await self._publish_next(publisher, marked, mode, staged=publisher.stages and number % 2 == 1)
            # A request after each publish, so that responses are cut at different lengths.
            late = _prompts(12)[len(running)]
            running.append(asyncio.create_task(client.generate(late, sampling, seed=len(running))))
        generations = await within(asyncio.gather(*running), 120.0)
        await client.close()
        for generation in generations:
            self._check(generation, 260)
        versions = [[s.version for s in g.segments] for g in generations]
        assert {v for seen in versions for v in seen} == set(range(first, last + 1))
        assert max(map(len, versions)) >= 4
        assert all(seen == sorted(set(seen)) for seen in versions)
        assert any(g.interruptions for g in generations) == (mode == "abort")

    async def test_a_drained_response_has_one_version(self, publisher: Publisher, marked: list[Any]) -> None:
        await self._publish_next(publisher, marked, "drain")
        client = publisher.client()
        running = []
        for i, prompt in enumerate(_prompts(24)):
            sampling = SamplingParams(max_tokens=20 + 5 * (i % 7))
            running.append(asyncio.create_task(client.generate(prompt, sampling, seed=i)))
        for _ in range(2):  # each ends all that have a slot; a third might find none left
            await publisher.sampled(40)
            await self._publish_next(publisher, marked, "drain")
        generations = await within(asyncio.gather(*running), 120.0)
        await client.close()
        for i, generation in enumerate(generations):
            self._check(generation, 20 + 5 * (i % 7))
            assert (len(generation.segments), generation.interruptions) == (1, 0)
        assert len({g.segments[0].version for g in generations}) > 1

    @pytest.mark.parametrize("mode", _MODES)
    async def test_the_engine_itself_stamps_each_chunk(
        self, publisher: Publisher, marked: list[Any], mode: PauseMode
    ) -> None:
        """Without a client that resumes: aborted responses end with the old version, later ones have the new."""
        tries = _TRIES
        while True:
            old = await self._publish_next(publisher, marked, mode)
            clients = [Client(publisher.engine, make_request(max_tokens=400, seed=i)) for i in range(3)]
            for client in clients:
                await client.first_tokens()
            await publisher.sampled(20)  # chunks end together: the publish comes in the middle of one
            new = await self._publish_next(publisher, marked, mode)
            tries -= 1
            if mode == "drain" or not tries or not any(len(client.ids) == 400 for client in clients):
                break
        after = await Client(publisher.engine, make_request(max_tokens=20)).done()
        assert after.versions == [new] * 20
        for client in [after, *clients]:
            await client.done()
            assert [self.mark_of(t) for t in client.ids] == [v % NUM_MARKS for v in client.versions]
        for client in clients:
            kept = client.versions.count(old)
            assert 0 < kept <= 400
            assert client.versions == [old] * kept + [new] * (len(client.ids) - kept)
            assert client.finish_reasons == (["abort"] if mode == "abort" else ["length"])
            assert (kept < 400) == (mode != "drain")
            assert (len(client.ids) == 400) == (mode != "abort")
        assert publisher.engine.health().version == new

    async def test_a_publish_without_a_version_leaves_the_stamps(self, publisher: Publisher, marked: list[Any]) -> None:
        tries = _TRIES
        while True:
            version = await self._publish_next(publisher, marked, "keep")
            client = Client(publisher.engine, make_request(max_tokens=400))
            await client.first_tokens()
            await publisher.sampled(5)
            other = (version + 3) % NUM_MARKS
            await publisher.publish(marked[other], None, "keep")
            tries -= 1
            if not tries or len(client.ids) < 400:
                break
        assert publisher.engine.health().version == version
        await client.done()
        kept = [self.mark_of(t) for t in client.ids].count(version % NUM_MARKS)
        assert 0 < kept < 400
        assert [self.mark_of(t) for t in client.ids] == [version % NUM_MARKS] * kept + [other] * (400 - kept)
        assert client.versions == [version] * 400

    @pytest.mark.parametrize("mode", ["abort", "keep"])
    async def test_after_a_failed_publish_nothing_is_sampled_until_a_good_one(
        self, publisher: Publisher, marked: list[Any], mode: PauseMode
    ) -> None:
        old = await self._publish_next(publisher, marked, mode)
        client = publisher.client()
        sampling = SamplingParams(max_tokens=400)
        running = [asyncio.create_task(client.generate(p, sampling, seed=i)) for i, p in enumerate(_prompts(4))]
        await publisher.sampled(40)
        # Fails twice: the state after a failed publish must allow another failure.
        for _ in range(2):
            failed = publisher.next_version()
            sent, received = await publisher.publish_broken(marked[failed % NUM_MARKS], failed, mode)
            assert isinstance(sent, ConnectionError)
            assert isinstance(received, WeightTransferError)
        # Weights are undefined now: no tokens, neither for old requests nor for new ones.
        before = publisher.engine.health()
        held = Client(publisher.engine, make_request(max_tokens=20))
        await settle()
        after = publisher.engine.health()
        assert (after.alive, after.version, after.generated_tokens) == (True, old, before.generated_tokens)
        assert held.chunks == []
        unfinished = sum(not response.done() for response in running)  # on a busy machine they may end before the pause
        new = await self._publish_next(publisher, marked, mode)
        assert (await held.done()).versions == [new] * 20
        generations = await within(asyncio.gather(*running))
        await client.close()
        found = [[s.version for s in generation.segments] for generation in generations]
        assert all(versions in ([old], [old, new], [new]) for versions in found), found
        assert sum(versions[-1] == new for versions in found) == unfinished
        for generation in generations:
            self._check(generation, 400)

    async def test_what_is_staged_disturbs_nobody_until_it_is_adopted(
        self, publisher: Publisher, marked: list[Any]
    ) -> None:
        """Nor does a transfer that fails, nor one that comes whole and is overtaken by the next."""
        if not publisher.stages:
            pytest.skip("this engine loads weights as they come")
        old = await self._publish_next(publisher, marked, "keep")
        client = Client(publisher.engine, make_request(max_tokens=400))
        await client.first_tokens()
        first, second = publisher.next_version(), publisher.next_version()
        with pytest.raises(WeightTransferError):
            await publisher.stage(marked[first % NUM_MARKS], first, broken=True)
        await publisher.stage(marked[first % NUM_MARKS], first)
        early = await Client(publisher.engine, make_request(max_tokens=20)).done()
        await client.done()
        for served in (client, early):
            assert served.versions == [old] * len(served.ids)
            assert [self.mark_of(t) for t in served.ids] == [old % NUM_MARKS] * len(served.ids)
            assert served.finish_reasons == ["length"]
        await publisher.publish(marked[second % NUM_MARKS], second, "keep", staged=True)
        after = await Client(publisher.engine, make_request(max_tokens=20)).done()
        assert after.versions == [second] * 20
        assert [self.mark_of(t) for t in after.ids] == [second % NUM_MARKS] * 20

    async def _publish_next(
        self, publisher: Publisher, marked: list[Any], mode: PauseMode, *, staged: bool = False
    ) -> int:
        version = publisher.next_version()
        await publisher.publish(marked[version % NUM_MARKS], version, mode, staged=staged)
        return version

    def _check(self, generation: Generation, length: int) -> None:
        assert (len(generation.token_ids), generation.finish_reason) == (length, "length")
        stamps = np.zeros(length, np.int64)
        at = 0
        for segment in generation.segments:
            assert segment.start == at
            stamps[segment.start : segment.stop] = segment.version % NUM_MARKS
            at = segment.stop
        assert at == length
        assert [self.mark_of(int(t)) for t in generation.token_ids] == stamps.tolist()


class StampingSuite(BoundarySuite, WeightSwapSuite):
    """The stamps, and samples after a swap against Hugging Face."""


def _prompts(count: int) -> Sequence[np.ndarray]:
    """Prompts of 1 to 90 tokens."""
    draw = np.random.default_rng(7)
    return [draw.integers(0, 128, 1 + (37 * i) % 90).astype(np.int32) for i in range(count)]
