"""Compares an engine's samples after a publish with Hugging Face's forward pass with the same weights."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from asyncrl.types import PauseMode, SamplingParams
from asyncrl_testing.engine_client import Client, make_request, within
from asyncrl_testing.publishing import Publisher
from asyncrl_testing.random_model import greedy_continuation, random_qwen3

_TOLERANCE = 1e-4
_ACROSS = 360
"""Tokens of a response over two publishes: a server goes on sampling until the pause has reached it."""
_LONG_PROMPT = 260
"""Tokens; more than two blocks of every engine's prefix cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Tokens `[start, stop)` of a response and the model, of Hugging Face, that sampled them."""

    model: Any
    start: int
    stop: int


class WeightSwapSuite:
    """Part of `StampingSuite`, which describes the fixtures. Random weights, other ones at every publish."""

    tied: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls) -> list[Any]:
        return [_random_model(seed, tied=cls.tied) for seed in range(4)]

    @pytest.mark.parametrize("mode", ["abort", "keep", "drain"])
    async def test_greedy_equals_hugging_face_after_every_publish(
        self, publisher: Publisher, models: list[Any], mode: PauseMode
    ) -> None:
        for model in models[:3]:
            await publisher.publish(model, publisher.next_version(), mode)
            requests = [make_request(prompt=p, max_tokens=32, temperature=0.0) for p in _prompts(8)]
            clients = [Client(publisher.engine, request) for request in requests]
            for i, client in enumerate(clients):
                await client.done()
                if i % 3 == 0:  # `generate` is slow; the check below says the same of greedy tokens
                    assert client.ids == greedy_continuation(model, client.request.prompt_ids.tolist(), 32)
                check_recomputed(client.request.prompt_ids, client.ids, client.logprobs, [Part(model, 0, 32)])

    async def test_sampled_logprobs_after_a_publish(self, publisher: Publisher, models: list[Any]) -> None:
        await publisher.publish(models[3], publisher.next_version(), "abort")
        requests = [make_request(prompt=p, max_tokens=32, seed=i) for i, p in enumerate(_prompts(8))]
        for client in [Client(publisher.engine, request) for request in requests]:
            await client.done()
            parts = [Part(models[3], 0, 32)]
            check_recomputed(client.request.prompt_ids, client.ids, client.logprobs, parts, greedy=False)

    async def test_keep_goes_on_with_the_cache_it_has(self, publisher: Publisher, models: list[Any]) -> None:
        """Keys and values of the prefix by the old weights, of everything from the boundary on by the new ones."""
        versions = {publisher.next_version(): model for model in models[:3]}
        (first, model), *others = versions.items()
        await publisher.publish(model, first, "keep")
        requests = [make_request(prompt=p, max_tokens=_ACROSS, temperature=0.0) for p in _prompts(5)]
        clients = [Client(publisher.engine, request) for request in requests]
        for client in clients:
            await client.first_tokens()
        for version, model in others:
            await publisher.sampled(60)
            await publisher.publish(model, version, "keep")
        stale = 0.0
        for client in clients:
            await client.done()
            prompt, parts = client.request.prompt_ids, parts_of(client.versions, versions)
            assert len(parts) == 3
            check_mixed_cache(prompt, client.ids, client.logprobs, parts)
            stale = max(stale, float(np.abs(recomputed_rows(prompt, client.ids, parts)[1] - client.logprobs).max()))
        assert stale > 0.1, "a full recompute would have passed as well: the reference proves nothing"

    async def test_abort_goes_on_with_a_full_recompute(self, publisher: Publisher, models: list[Any]) -> None:
        versions = {publisher.next_version(): model for model in models[:3]}
        (first, model), *others = versions.items()
        await publisher.publish(model, first, "abort")
        client = publisher.client()
        prompts, sampling = _prompts(5), SamplingParams(temperature=0.0, max_tokens=_ACROSS)
        running = [asyncio.create_task(client.generate(np.array(prompt, np.int32), sampling)) for prompt in prompts]
        for version, model in others:
            await publisher.sampled(60)
            await publisher.publish(model, version, "abort")
        generations = await within(asyncio.gather(*running), 120.0)
        await client.close()
        for prompt, generation in zip(prompts, generations, strict=True):
            parts = [Part(versions[s.version], s.start, s.stop) for s in generation.segments]
            check_recomputed(prompt, generation.token_ids.tolist(), generation.logprobs, parts)
        assert sum(g.interruptions for g in generations) >= 5

    async def test_a_new_request_after_keep_sees_no_old_cache(self, publisher: Publisher, models: list[Any]) -> None:
        """Its prompt has been served before, and is being served still, by the old weights. Weights that come without a
        version make the cache as old as any others."""
        old, new, again = models[:3]
        prompt = np.random.default_rng(3).integers(0, 128, _LONG_PROMPT).tolist()
        await publisher.publish(old, publisher.next_version(), "keep")
        await Client(publisher.engine, make_request(prompt=prompt, max_tokens=4)).done()
        version, running = publisher.next_version(), []
        for model, published in ((new, version), (again, None)):
            running.append(Client(publisher.engine, make_request(prompt=prompt, max_tokens=240)))
            await running[-1].first_tokens()
            publishing = asyncio.create_task(publisher.publish(model, published, "keep"))
            assert not running[-1].task.done()
            await within(publishing)
            clients = [await Client(publisher.engine, make_request(prompt=prompt, max_tokens=8)).done()]
            together = [make_request(prompt=p, max_tokens=8, seed=1) for p in (prompt, prompt[:-1])]
            clients += [Client(publisher.engine, request) for request in together]
            for client in clients:
                await client.done()
                assert client.versions == [version] * 8
                parts = [Part(model, 0, 8)]
                check_recomputed(client.request.prompt_ids, client.ids, client.logprobs, parts, greedy=False)
        for client in running:
            await client.done()


def parts_of(versions: Sequence[int], models: dict[int, Any]) -> list[Part]:
    """The parts of a response from the version of each of its tokens."""
    cuts = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
    return [Part(models[versions[a]], a, b) for a, b in itertools.pairwise(cuts)]


def check_recomputed(
    prompt: Sequence[int] | np.ndarray,
    ids: Sequence[int],
    logprobs: Sequence[float] | np.ndarray,
    parts: Sequence[Part],
    *,
    greedy: bool = True,
) -> None:
    """The response equals that of models which computed all of its prefix themselves; of greedy ones each token is
    the likeliest, up to the tolerance."""
    rows, chosen = recomputed_rows(prompt, ids, parts)
    np.testing.assert_allclose(logprobs, chosen, rtol=0, atol=_TOLERANCE)
    if greedy:
        np.testing.assert_allclose(chosen, rows.max(axis=1), rtol=0, atol=_TOLERANCE)


def check_mixed_cache(
    prompt: Sequence[int] | np.ndarray, ids: Sequence[int], logprobs: Sequence[float], parts: Sequence[Part]
) -> None:
    """The greedy response equals that of models which took over, each, the cache of the one before.

    The last token that a model sampled is not in its cache yet: the next model computes its keys and values.
    """
    import torch
    from transformers import DynamicCache

    sequence = torch.tensor([[*map(int, prompt), *ids]])
    cache, done, rows = DynamicCache(), 0, []
    for part in parts:
        stop = len(prompt) + part.stop - 1
        with torch.inference_mode():
            logits = part.model(sequence[:, done:stop], past_key_values=cache, use_cache=True).logits[0]
        rows.append(logits[-(part.stop - part.start) :].log_softmax(-1).numpy())
        done = stop
    all_rows = np.concatenate(rows)
    chosen = all_rows[np.arange(len(ids)), list(ids)]
    np.testing.assert_allclose(logprobs, chosen, rtol=0, atol=_TOLERANCE)
    np.testing.assert_allclose(chosen, all_rows.max(axis=1), rtol=0, atol=_TOLERANCE)


def recomputed_rows(
    prompt: Sequence[int] | np.ndarray, ids: Sequence[int], parts: Sequence[Part]
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [T, vocabulary] at each place of the response, and [T] of its own tokens."""
    import torch

    sequence = torch.tensor([[*map(int, prompt), *ids]])
    rows = []
    for part in parts:
        stop = len(prompt) + part.stop - 1
        with torch.inference_mode():
            logits = part.model(sequence[:, :stop]).logits[0]
        rows.append(logits[-(part.stop - part.start) :].log_softmax(-1).numpy())
    all_rows = np.concatenate(rows)
    return all_rows, all_rows[np.arange(len(ids)), list(ids)]


def _random_model(seed: int, *, tied: bool) -> Any:
    """`random_qwen3` with random norms, so that an unpublished norm is detected."""
    import torch

    model = random_qwen3(seed=seed, tie_word_embeddings=tied)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.7, 1.3, generator=generator)
    return model


def _prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 90 tokens."""
    draw = np.random.default_rng(11)
    return [draw.integers(0, 128, 1 + (41 * i) % 90).tolist() for i in range(count)]
