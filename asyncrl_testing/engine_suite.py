"""The conformance suite that every `InferenceEngine` and its fake must pass.

A test module subclasses `EngineConformance` and gives two fixtures: `engine`, started, idle, not paused, at version 0;
and `make_engine`, an async function that starts another one like it. Engines are deterministic under a given seed
unless the subclass says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import GenerationError
from asyncrl.inference.engine import InferenceEngine
from asyncrl_testing.engine_client import Client, MakeEngine, again_if_late, complete, make_request, within
from asyncrl_testing.engine_pause_suite import PauseConformance
from asyncrl_testing.engine_sampling_suite import SamplingConformance


class EngineConformance(SamplingConformance, PauseConformance):
    context_tokens = 512
    """At most `max_model_len` of the engine."""

    async def test_chunks_arrive_in_order_with_one_finish_reason(self, engine: InferenceEngine) -> None:
        client = await complete(engine, max_tokens=24)
        assert len(client.chunks) > 1
        assert client.finish_reasons == ["length"]
        assert client.chunks[-1].finish_reason == "length"
        assert len(client.ids) == len(client.logprobs) == 24
        assert all(x <= 0 for x in client.logprobs)
        assert set(client.versions) == {0}
        assert all(chunk.request_id == client.request.request_id and chunk.error is None for chunk in client.chunks)
        assert [chunk.cached_tokens for chunk in client.chunks[:-1]] == [0] * (len(client.chunks) - 1)
        assert 0 <= client.chunks[-1].cached_tokens <= len(client.request.prompt_ids)
        for chunk in client.chunks:
            assert (chunk.token_ids.dtype, chunk.logprobs.dtype) == (np.int32, np.float32)

    @pytest.mark.parametrize("max_tokens", [1, 2, 17])
    async def test_max_tokens_is_exact(self, engine: InferenceEngine, max_tokens: int) -> None:
        assert len((await complete(engine, max_tokens=max_tokens)).ids) == max_tokens

    async def test_a_stop_token_ends_the_response_and_belongs_to_it(self, engine: InferenceEngine) -> None:
        free = await complete(engine, temperature=0.0)
        stop = free.ids[9]
        stopped = await complete(engine, temperature=0.0, stop=(10**6 + 1, stop))
        assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
        assert stopped.finish_reasons == ["stop"]

    async def test_one_token_prompts_and_many_at_once(self, engine: InferenceEngine) -> None:
        clients = [Client(engine, make_request(prompt=(1 + i % 7,) * (1 + i % 5), max_tokens=8)) for i in range(100)]
        for client in clients:
            await client.done()
            assert len(client.ids) == 8
            assert client.finish_reasons == ["length"]

    @again_if_late
    async def test_abort_one_keeps_its_tokens_and_spares_the_rest(self, engine: InferenceEngine) -> None:
        alone = (await complete(engine, max_tokens=self.long_response)).ids
        aborted, other = (Client(engine, make_request(max_tokens=self.long_response)) for _ in range(2))
        await aborted.first_tokens()
        await within(engine.abort([aborted.request.request_id]))
        (await aborted.done()).require_unfinished()
        assert aborted.finish_reasons == ["abort"]
        assert 0 < len(aborted.ids) < self.long_response
        await other.done()
        assert (other.finish_reasons, len(other.ids)) == (["length"], self.long_response)
        if self.deterministic:
            assert aborted.ids == alone[: len(aborted.ids)]
            assert other.ids == alone

    @again_if_late
    async def test_abort_all_ends_queued_requests_too(self, engine: InferenceEngine) -> None:
        clients = [Client(engine, make_request(max_tokens=self.long_response)) for _ in range(100)]
        await clients[0].first_tokens()
        await within(engine.abort(None))
        for client in clients:
            (await client.done()).require_unfinished()
            assert client.finish_reasons == ["abort"]
        assert engine.health().running == engine.health().waiting == 0

    async def test_abort_of_unknown_ids_is_ignored(self, engine: InferenceEngine) -> None:
        client = Client(engine, make_request())
        await within(engine.abort(["never heard of", "nor of this"]))
        assert (await client.done()).finish_reasons == ["length"]
        await within(engine.abort([client.request.request_id]))

    async def test_a_consumer_that_leaves_frees_its_slot(self, engine: InferenceEngine) -> None:
        stream = engine.generate(make_request(max_tokens=self.long_response))
        await within(anext(stream))
        await stream.aclose()  # type: ignore[attr-defined]
        await within(engine.pause("keep"))
        assert engine.health().running == 0

    async def test_a_resumed_request_continues_as_if_never_interrupted(self, engine: InferenceEngine) -> None:
        if not self.deterministic:
            pytest.skip("the engine does not promise determinism")
        whole = await complete(engine, max_tokens=40, seed=3)
        for cut in (1, 16, 39):
            prompt = [*whole.request.prompt_ids.tolist(), *whole.ids[:cut]]
            rest = await complete(engine, prompt=prompt, max_tokens=40 - cut, seed=3, first_position=cut)
            assert rest.ids == whole.ids[cut:]
            np.testing.assert_allclose(rest.logprobs, whole.logprobs[cut:], atol=1e-4)

    async def test_tokens_do_not_depend_on_batch_mates(self, engine: InferenceEngine) -> None:
        if not self.deterministic:
            pytest.skip("the engine does not promise determinism")
        alone = (await complete(engine, seed=11)).ids
        mates = [Client(engine, make_request(prompt=range(3 + 5 * i), seed=i)) for i in range(1, 5)]
        twin = Client(engine, make_request(seed=11))
        assert (await twin.done()).ids == alone
        for mate in mates:
            await mate.done()

    scores = True
    """The engine scores given tokens."""

    async def test_given_tokens_are_scored_as_they_are_sampled(self, engine: InferenceEngine) -> None:
        """Greedy: a sampled token has the same log-probability when the engine scores it, concurrently with responses
        and in prompts of different lengths."""
        free = await complete(engine, temperature=0.0, max_tokens=24)
        prompt, response = free.request.prompt_ids.tolist(), free.ids
        if not self.scores:
            with pytest.raises(GenerationError, match="does not score"):
                await complete(engine, prompt=[*prompt, *response], score_from=len(prompt))
            return
        beside = Client(engine, make_request(max_tokens=self.long_response))
        given = [
            Client(engine, make_request(prompt=[*prompt, *response[:n]], score_from=len(prompt))) for n in (1, 7, 24)
        ]
        for client, n in zip(given, (1, 7, 24), strict=True):
            await client.done()
            assert client.ids == response[:n]
            assert client.finish_reasons == ["stop"]
            assert set(client.versions) == {0}
            if self.models_text:
                assert client.logprobs == pytest.approx(free.logprobs[:n], abs=1e-3)
        await beside.done()
        assert len(beside.ids) == self.long_response
        whole = await complete(engine, prompt=[*prompt, *response], score_from=1)
        assert len(whole.ids) == len(prompt) + len(response) - 1

    async def test_the_likeliest_tokens_of_a_place_come_with_its_score(self, engine: InferenceEngine) -> None:
        """Greedy: the token that the engine samples is the likeliest, and has the log-probability of its score."""
        if not self.scores:
            pytest.skip("the engine does not score")
        free = await complete(engine, temperature=0.0, max_tokens=12)
        prompt, response = free.request.prompt_ids.tolist(), free.ids
        asked = {"prompt": [*prompt, *response], "score_from": len(prompt)}
        plain, *given = await asyncio.gather(*(complete(engine, **asked, score_top=k) for k in (0, 1, 5)))
        assert all(not chunk.extra for chunk in plain.chunks)
        for client, k in zip(given, (1, 5), strict=True):
            ids, logprobs = (
                np.concatenate([c.extra[name] for c in client.chunks if len(c.token_ids)])
                for name in ("top_ids", "top_logprobs")
            )
            assert (ids.shape, ids.dtype, logprobs.shape) == ((12, k), np.int32, (12, k))
            assert (np.diff(logprobs) <= 0).all(), "likeliest first"
            assert client.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
            if self.models_text:
                assert ids[:, 0].tolist() == response
                assert logprobs[:, 0] == pytest.approx(plain.logprobs, abs=1e-5)
                assert all(len(set(place)) == k for place in ids.tolist())

    @pytest.mark.parametrize("top", [-1, 2**31])
    async def test_more_tokens_of_a_place_than_there_are_is_refused(self, engine: InferenceEngine, top: int) -> None:
        with pytest.raises(GenerationError, match="score"):
            await complete(engine, prompt=(5, 6, 7, 8), score_from=1, score_top=top)
        with pytest.raises(GenerationError, match="score"):
            await complete(engine, prompt=(5, 6, 7, 8), score_top=1)

    records = False
    """The engine records the experts of the suite's model."""

    async def test_every_token_has_its_experts_where_the_engine_records_them(self, engine: InferenceEngine) -> None:
        if not self.records:
            with pytest.raises(GenerationError, match="records none"):
                await complete(engine, experts=True)
            return
        asked, other = [Client(engine, make_request(experts=on, max_tokens=30)) for on in (True, False)]
        await asked.done()
        await other.done()
        for chunk in asked.chunks:
            if len(chunk.token_ids):
                assert (len(chunk.extra["experts"]), chunk.extra["experts"].dtype) == (len(chunk.token_ids), np.int16)
                assert (chunk.extra["experts"] >= 0).all()
        assert all(not chunk.extra for chunk in other.chunks)

    @pytest.mark.parametrize("start", [0, 4, 9])
    async def test_nothing_to_score_is_refused(self, engine: InferenceEngine, start: int) -> None:
        with pytest.raises(GenerationError, match="score_from"):
            await complete(engine, prompt=(5, 6, 7, 8), score_from=start)

    models_text = True
    """The log-probabilities are a real model's."""

    async def test_a_request_that_does_not_fit_is_refused(self, engine: InferenceEngine) -> None:
        with pytest.raises(GenerationError, match="max_model_len"):
            await complete(engine, max_tokens=10**6)
        assert (await complete(engine)).finish_reasons == ["length"]

    @pytest.mark.parametrize("response", [1, 6, 300])
    async def test_a_request_may_fill_the_context(self, engine: InferenceEngine, response: int) -> None:
        """Its last tokens come too, also where a resumed request has few of them left."""
        prompt = [3 + i % 90 for i in range(self.context_tokens - response)]
        client = await complete(engine, prompt=prompt, max_tokens=response)
        assert (len(client.ids), client.finish_reasons) == (response, ["length"])

    async def test_health_counts(self, engine: InferenceEngine) -> None:
        before = engine.health()
        assert (before.alive, before.running, before.waiting) == (True, 0, 0)
        client = Client(engine, make_request(max_tokens=self.long_response))
        await client.first_tokens()
        assert engine.health().running == 1
        await within(engine.pause("keep"))
        held = Client(engine, make_request(max_tokens=8))
        await asyncio.sleep(0)
        assert engine.health().waiting == 1
        await within(engine.resume())
        await client.done()
        await held.done()
        after = engine.health()
        assert (after.running, after.waiting) == (0, 0)
        assert after.generated_tokens - before.generated_tokens == self.long_response + 8
        assert after.busy_s >= before.busy_s
        if after.decode_steps is not None:
            steps = after.decode_steps - (before.decode_steps or 0)
            assert self.long_response - 1 <= steps <= 2 * self.long_response

    @again_if_late
    async def test_stop_ends_everything_with_an_error(self, make_engine: MakeEngine) -> None:
        engine = await within(make_engine(), 300.0)
        running = Client(engine, make_request(max_tokens=self.long_response))
        await running.first_tokens()
        await within(engine.pause("keep"))
        queued = Client(engine, make_request())
        await asyncio.sleep(0)
        await within(engine.stop())
        running.require_unfinished()
        await within(engine.stop())
        for client in (running, queued):
            with pytest.raises(GenerationError):
                await client.done()
        with pytest.raises(GenerationError):
            await complete(engine)
        with pytest.raises(GenerationError):
            await within(engine.resume())
        assert not engine.health().alive

    @again_if_late
    async def test_stop_ends_a_drain_in_progress(self, make_engine: MakeEngine) -> None:
        engine = await within(make_engine(), 300.0)
        running = Client(engine, make_request(max_tokens=self.long_response))
        await running.first_tokens()
        pausing: Coroutine[Any, Any, None] = engine.pause("drain")
        task = asyncio.create_task(pausing)
        await asyncio.sleep(0)
        await within(engine.stop())
        running.require_unfinished()
        with pytest.raises(GenerationError):
            await within(task)
        with pytest.raises(GenerationError):
            await running.done()
