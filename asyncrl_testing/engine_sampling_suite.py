"""Conformance suite of engines: sampling by `SamplingParams`."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from asyncrl.errors import GenerationError
from asyncrl.inference.engine import InferenceEngine
from asyncrl_testing.engine_client import Client, complete, make_request, within
from asyncrl_testing.fake_engine import FakeEngine


class SamplingConformance:
    async def test_min_tokens_bars_every_stop_token_until_then(self, engine: InferenceEngine) -> None:
        free = await complete(engine, temperature=0.0, max_tokens=40)
        stop = (*dict.fromkeys(free.ids[:3]), 10**6 + 1)
        held = await complete(engine, temperature=0.0, max_tokens=40, stop=stop, min_tokens=20)
        assert len(held.ids) >= 20
        assert not set(held.ids[:20]) & set(stop)
        assert [i for i, token in enumerate(held.ids) if token in stop] in ([], [len(held.ids) - 1])
        assert held.finish_reasons == ["stop" if held.ids[-1] in stop else "length"]

    async def test_min_tokens_ends_with_the_count(self, engine: InferenceEngine) -> None:
        """The token after the last guarded one may stop."""
        free = await complete(engine, temperature=0.0)
        place = next(i for i in range(3, 24) if free.ids[i] not in free.ids[:i])
        at_limit = await complete(engine, temperature=0.0, stop=(free.ids[place],), min_tokens=place)
        assert (at_limit.ids, at_limit.finish_reasons) == (free.ids[: place + 1], ["stop"])
        beyond = await complete(engine, temperature=0.0, stop=(free.ids[place],), min_tokens=place + 1)
        assert beyond.ids[:place] == free.ids[:place]
        assert len(beyond.ids) > place + 1
        assert beyond.ids[place] != free.ids[place]

    async def test_min_tokens_of_one_request_leaves_the_others(self, engine: InferenceEngine) -> None:
        free = await complete(engine, temperature=0.0)
        stop = free.ids[4]
        requests = [
            make_request(temperature=0.0, stop=(stop,) * (1 + i % 2), min_tokens=24 * (i % 2)) for i in range(6)
        ]
        clients = [Client(engine, request) for request in requests]
        for client in clients:
            await client.done()
            if client.request.sampling.min_tokens:
                assert (len(client.ids), stop in client.ids, client.finish_reasons) == (24, False, ["length"])
            else:
                assert client.ids == free.ids[: free.ids.index(stop) + 1]

    @pytest.mark.parametrize("min_tokens", [-1, 25])
    async def test_min_tokens_outside_the_budget_is_refused(self, engine: InferenceEngine, min_tokens: int) -> None:
        with pytest.raises(GenerationError, match="min_tokens"):
            await complete(engine, max_tokens=24, min_tokens=min_tokens)

    async def test_min_tokens_renormalises_what_is_left(self, engine: InferenceEngine) -> None:
        """With a the likeliest token and b the next: barring b leaves p(a) / (1 - p(b))."""
        _needs_a_distribution(engine)
        (a, p_a), (b, p_b) = await self._likeliest(engine, 2)
        without_b = await complete(engine, temperature=0.0, max_tokens=1, min_tokens=1, stop=(b,))
        assert without_b.ids == [a]
        assert without_b.logprobs[0] == pytest.approx(math.log(p_a / (1 - p_b)), abs=1e-3)

    @pytest.mark.parametrize(
        "extreme",
        [
            {"temperature": 1e-40},
            {"temperature": math.inf},
            {"temperature": math.nan},
            {"top_p": 1e-300},
            {"top_k": 10**21},
        ],
        ids=str,
    )
    async def test_values_that_no_arithmetic_bears_are_refused_and_harm_nobody(
        self, engine: InferenceEngine, extreme: dict[str, float]
    ) -> None:
        other = Client(engine, make_request(max_tokens=40))
        with pytest.raises(GenerationError, match=next(iter(extreme))):
            await complete(engine, **extreme)
        assert len((await other.done()).ids) == 40

    @pytest.mark.parametrize(
        "bound", [{"temperature": 0.01}, {"temperature": 2.0}, {"top_p": 1e-6}, {"top_k": 2**31 - 1}], ids=str
    )
    async def test_values_at_their_bounds_are_served(self, engine: InferenceEngine, bound: dict[str, float]) -> None:
        client = await complete(engine, max_tokens=8, **bound)
        assert len(client.ids) == 8
        assert all(math.isfinite(x) for x in client.logprobs)

    async def test_one_candidate_is_greedy(self, engine: InferenceEngine) -> None:
        greedy = await complete(engine, temperature=0.0)
        for filters in ({"top_k": 1}, {"top_p": 1e-6}):
            only = await complete(engine, temperature=1.3, seed=5, **filters)
            assert only.ids == greedy.ids
            if not isinstance(engine, FakeEngine):
                np.testing.assert_allclose(only.logprobs, 0.0, atol=1e-6)

    async def test_top_k_and_top_p_bound_what_is_drawn(self, engine: InferenceEngine) -> None:
        _needs_a_distribution(engine)
        ranked = await self._likeliest(engine, 3)
        mass = np.cumsum([p for _, p in ranked])
        # Of the first two tokens' mass the first token falls short and the second crosses it.
        for count, filters in [(3, {"top_k": 3}), (2, {"top_p": float(mass[:2].mean())})]:
            allowed = dict(ranked[:count])
            requests = [make_request(max_tokens=1, seed=i, **filters) for i in range(48)]
            clients = await within(asyncio.gather(*(Client(engine, request).done() for request in requests)))
            for client in clients:
                assert client.ids[0] in allowed
                wanted = math.log(allowed[client.ids[0]] / mass[count - 1])
                assert client.logprobs[0] == pytest.approx(wanted, abs=1e-3)
            assert len({client.ids[0] for client in clients}) > 1

    async def test_seeds_make_the_difference(self, engine: InferenceEngine) -> None:
        _needs_a_distribution(engine)
        drawn = [tuple((await complete(engine, temperature=1.0, max_tokens=32, seed=i)).ids) for i in range(4)]
        assert len(set(drawn)) == 4

    async def _likeliest(self, engine: InferenceEngine, count: int) -> list[tuple[int, float]]:
        """The likeliest first tokens with their probabilities, found by barring known ones in turn."""
        found: list[tuple[int, float]] = []
        for _ in range(count):
            stop, left = [token for token, _ in found], 1 - sum(p for _, p in found)
            best = await complete(engine, temperature=0.0, max_tokens=1, min_tokens=1, stop=stop)
            found.append((best.ids[0], left * math.exp(best.logprobs[0])))
        return found


def _needs_a_distribution(engine: InferenceEngine) -> None:
    if isinstance(engine, FakeEngine):
        pytest.skip("the fake writes prescribed tokens")
