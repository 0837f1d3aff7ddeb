"""Compares an engine's responses after a publish with Hugging Face's forward pass with the published weights.

Derive a test class and define `make_engine`; the module needs a fixture `process_group`, of this process alone:

    class TestServedWeights(ServedWeightsConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def make_engine(cls): ...  # path -> a started engine with placeholder weights, for a model of 512 tokens
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import TrainerConfig
from asyncrl.errors import DeadlineExceeded, WeightTransferError
from asyncrl.inference.engine import InferenceEngine, StagingEngine
from asyncrl.trainer.fsdp.backend import FsdpBackend
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import Digest, PauseMode, TensorSpec, TransferSource, decoder_of
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transport import WeightSender
from asyncrl.weights.transports import build_sender
from asyncrl_testing.engine_client import Client, make_request, within
from asyncrl_testing.random_model import greedy_continuation, random_qwen3, random_qwen3_moe, write_random_qwen3

BUCKET_BYTES = 1 << 16
"""Far below the larger tensors, so that every part of the receiver's memory is used again within a publish."""
LONG_PROMPT = [int(i) for i in np.random.default_rng(5).integers(0, 128, 300)]
"""Of more than two blocks of an engine's KV cache on a CPU."""

Weights = Sequence[tuple[str, torch.Tensor]]
Link = tuple[WeightSender, TransferSource]
MakeEngine = Callable[[Path], Awaitable[InferenceEngine]]

publish_ids = itertools.count(1)


async def publish(
    engine: InferenceEngine,
    link: Link,
    weights: Iterable[tuple[str, torch.Tensor]],
    version: int | None,
    *,
    mode: PauseMode = "keep",
    timeout_s: float = 30.0,
    verify: bool = True,
    staged: bool = False,
) -> tuple[Digest | None, Digest | None]:
    """One publish as the checkpoint engine does it; returns the sender's and the engine's digest."""
    sender, source = link
    weights = list(weights)
    tensors = [spec_of(name, tensor) for name, tensor in weights]
    manifest = make_manifest(next(publish_ids), version, tensors, BUCKET_BYTES, verify=verify)
    manifest = replace(manifest, is_staged=staged)
    # A staged publish arrives while the engine generates, so its pause comes after the transfer.
    receive = engine.load_weights
    if staged:
        assert isinstance(engine, StagingEngine)
        receive = engine.stage_weights
    else:
        await within(engine.pause(mode))
    sending = asyncio.create_task(asyncio.to_thread(sender.send, manifest, weights, timeout_s))
    receiving = asyncio.create_task(receive(manifest, source, timeout_s))
    sent, received = await within(asyncio.gather(sending, receiving, return_exceptions=True), 2 * timeout_s)
    if isinstance(received, BaseException):
        assert isinstance(sent, WeightTransferError)
        raise received
    assert not isinstance(sent, BaseException), sent
    if staged:
        assert isinstance(engine, StagingEngine)
        await within(engine.pause(mode))
        await within(engine.load_staged(timeout_s))
    await within(engine.commit(version))
    await within(engine.resume())
    return sent, received


@torch.no_grad()
def reference_logprobs(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> np.ndarray:
    """[len(ids)] float64: of `model`'s distribution at temperature 1."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()


async def assert_serves(engine: InferenceEngine, model: Any, version: int) -> None:
    """Greedy tokens are Hugging Face's, and so are the log-probabilities of sampled ones."""
    greedy = await Client(engine, make_request(max_tokens=48, temperature=0.0)).done()
    assert greedy.ids == greedy_continuation(model, (5, 6, 7, 8), 48)
    sampled = await asyncio.gather(*(Client(engine, make_request(max_tokens=48, seed=i)).done() for i in range(8)))
    for client in (greedy, *sampled):
        assert set(client.versions) == {version}
        reference = reference_logprobs(model, client.request.prompt_ids.tolist(), client.ids)
        np.testing.assert_allclose(client.logprobs, reference, rtol=0, atol=2e-5)


async def assert_experts_are_told(engine: InferenceEngine, model: Any) -> None:
    """Each token carries the choices of Hugging Face's routers at the token before it, also if the response ends at a
    stop token, is resumed, or is ended from outside."""
    greedy = await Client(engine, make_request(max_tokens=40, temperature=0.0)).done()
    requests = [make_request(max_tokens=40, seed=seed, experts=True) for seed in range(4)]
    # The special cases: ended by a stop token, resumed in the middle, aborted from outside.
    requests.append(make_request(max_tokens=40, temperature=0.0, stop=(greedy.ids[17],), experts=True))
    requests.append(make_request(prompt=[5, 6, 7, 8, *greedy.ids[:9]], first_position=9, temperature=0.0, experts=True))
    aborted = Client(engine, make_request(max_tokens=400, experts=True))
    clients = await asyncio.gather(*(Client(engine, request).done() for request in requests))
    await within(engine.abort([aborted.request.request_id]))
    for client in (*clients, await aborted.done()):
        chunks = [chunk for chunk in client.chunks if len(chunk.token_ids)]
        for chunk in chunks:
            assert (len(chunk.extra["experts"]), chunk.extra["experts"].dtype) == (len(chunk.token_ids), np.int16)
        if chunks:
            found = np.concatenate([chunk.extra["experts"] for chunk in chunks])
            wanted = reference_experts(model, client.request.prompt_ids.tolist(), client.ids)
            np.testing.assert_array_equal(np.sort(found), np.sort(wanted))
    assert clients[4].ids == greedy.ids[: greedy.ids.index(greedy.ids[17]) + 1]
    assert clients[5].ids == greedy.ids[9 : 9 + len(clients[5].ids)]
    assert all(clients[i].ids for i in range(6))


@torch.no_grad()
def reference_experts(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> np.ndarray:
    """[len(ids), L, k]: the choices of `model`'s routers at the tokens before `ids`."""
    chosen: list[torch.Tensor] = []
    hooks = [
        r.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for r in (layer.mlp.gate for layer in decoder_of(model).layers)
    ]
    model(torch.tensor([[*prompt, *ids]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)[len(prompt) - 1 : -1].numpy()


def _without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: [(name, t) for name, t in weights if part not in name]


def _with(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], Weights]:
    return lambda weights: [(name, change(t) if part in name else t) for name, t in weights]


WRONG: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "missing": (_without("layers.2.mlp.up_proj"), r"layers\.2\.mlp\.up_proj"),
    "missing norm": (_without("model.norm.weight"), r"model\.norm\.weight"),
    "missing last": (lambda weights: weights[:-1], r"did not come"),
    "extra": (lambda weights: [*weights, ("model.layers.9.mlp.up_proj.weight", weights[5][1])], r"layers\.9\.mlp"),
    "larger": (
        _with("layers.1.self_attn.k_proj", lambda t: torch.cat([t, t])),
        r"layers\.1\.self_attn\.k_proj(.|\n)*64, 128",
    ),
    "transposed": (_with("layers.3.mlp.down_proj", lambda t: t.T.contiguous()), r"layers\.3\.mlp\.down_proj"),
}


def weights_in_training(path: Path) -> Weights:
    """The tensors that a trainer would publish; needs a process group."""
    spec = TrainerSpec(model=ModelConfig(path=str(path)), trainer=TrainerConfig(), algorithm=AlgorithmConfig())
    backend = FsdpBackend(spec, rank=0, world_size=1, device=torch.device("cpu"))
    return [(name, tensor.clone()) for name, tensor in backend.named_weights()]


@pytest.mark.asyncio(loop_scope="class")
class ServedWeightsConformance:
    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def engine(
        cls, make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
    ) -> AsyncIterator[InferenceEngine]:
        torch.set_num_threads(1)
        engine = await make_engine(write_random_qwen3(tmp_path_factory.mktemp("model")))
        yield engine
        await within(engine.stop(), 60.0)

    @pytest.fixture(scope="class")
    @classmethod
    def link(cls) -> Iterator[Link]:
        with closing(build_sender("ipc", BUCKET_BYTES, 1)) as sender:
            yield sender, sender.open()

    async def test_before_the_first_publish_nothing_is_sampled(self, engine: InferenceEngine, link: Link) -> None:
        client = Client(engine, make_request(max_tokens=4))
        await asyncio.sleep(0.2)
        assert (client.chunks, engine.health().version, engine.health().waiting) == ([], None, 1)
        await publish(engine, link, random_qwen3(seed=9).named_parameters(), 3)
        assert (await client.done()).versions == [3] * 4

    async def test_new_weights_reach_every_layer(self, engine: InferenceEngine, link: Link) -> None:
        """The output layer shares the embeddings, and an engine may compute with a packed copy of it; the tensors come
        in pieces through memory that is used again. Both go wrong in silence."""
        for version in (4, 5):
            model = random_qwen3(seed=version)
            sent, received = await publish(engine, link, model.named_parameters(), version)
            assert sent == received is not None
            await assert_serves(engine, model, version)

    @pytest.mark.parametrize("version", [6, None])
    async def test_the_prefix_cache_of_other_weights_is_never_hit(
        self, engine: InferenceEngine, link: Link, version: int | None
    ) -> None:
        """Also when a publish leaves the version as it is."""

        async def ask() -> tuple[Client, int]:
            client = await Client(engine, make_request(prompt=LONG_PROMPT, max_tokens=16, temperature=0.0)).done()
            return client, client.chunks[-1].cached_tokens

        await ask()
        _, cached = await ask()
        assert cached > 128
        model = random_qwen3(seed=20 + (version or 0))
        await publish(engine, link, model.named_parameters(), version)
        client, cached = await ask()
        assert cached == 0
        np.testing.assert_allclose(
            client.logprobs, reference_logprobs(model, LONG_PROMPT, client.ids), rtol=0, atol=2e-5
        )

    async def test_a_publish_in_mid_generation_is_stamped_where_it_came(
        self, engine: InferenceEngine, link: Link
    ) -> None:
        old, new = random_qwen3(seed=30), random_qwen3(seed=31)
        await publish(engine, link, old.named_parameters(), 7)
        client = Client(engine, make_request(max_tokens=400, temperature=0.0))
        await client.first_tokens()
        await publish(engine, link, new.named_parameters(), 8)
        await client.done()
        swap = client.versions.index(8)
        assert client.versions == [7] * swap + [8] * (400 - swap)
        assert client.ids[:swap] == greedy_continuation(old, (5, 6, 7, 8), swap)
        stale = client.logprobs[swap:]  # the prompt's KV cache is of version 7: neither model alone explains them
        assert not np.allclose(stale, reference_logprobs(old, [5, 6, 7, 8], client.ids)[swap:], atol=1e-3)

    @pytest.mark.parametrize("fault", list(WRONG))
    async def test_weights_that_do_not_fit_are_refused_by_name(
        self, engine: InferenceEngine, link: Link, fault: str
    ) -> None:
        make_wrong, names_it = WRONG[fault]
        model = random_qwen3(seed=40)
        with pytest.raises(WeightTransferError, match=names_it):
            await publish(engine, link, make_wrong(list(model.named_parameters())), 50)
        await publish(engine, link, model.named_parameters(), 51)
        await assert_serves(engine, model, 51)

    async def test_staged_weights_that_do_not_fit_are_refused_before_they_stop_anybody(
        self, engine: InferenceEngine, link: Link
    ) -> None:
        """Except a missing tensor: some engines detect it while they load the others."""
        if not isinstance(engine, StagingEngine):
            pytest.skip("this engine loads weights as they come")
        served, model = random_qwen3(seed=45), random_qwen3(seed=46)
        await publish(engine, link, served.named_parameters(), 53)
        for fault in ("extra", "larger", "transposed"):
            make_wrong, names_it = WRONG[fault]
            with pytest.raises(WeightTransferError, match=names_it):
                await publish(engine, link, make_wrong(list(model.named_parameters())), 54, staged=True)
            await assert_serves(engine, served, 53)
        with pytest.raises(WeightTransferError, match=WRONG["missing"][1]):
            await publish(engine, link, WRONG["missing"][0](list(model.named_parameters())), 54, staged=True)
        await within(engine.pause("keep"))
        with pytest.raises(WeightTransferError, match="stage a publish first"):
            await engine.load_staged(5.0)
        await publish(engine, link, model.named_parameters(), 55, staged=True)
        await assert_serves(engine, model, 55)

    async def test_a_sender_that_does_not_come_costs_its_deadline_and_no_more(
        self, engine: InferenceEngine, link: Link
    ) -> None:
        _, source = link
        specs = [TensorSpec("model.norm.weight", (128,), "float32", 512)]
        await within(engine.pause("keep"))
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await engine.load_weights(make_manifest(next(publish_ids), 60, specs, BUCKET_BYTES), source, 1.5)
        assert time.monotonic() - started_s < 5.0
        model = random_qwen3(seed=41)
        await publish(engine, link, model.named_parameters(), 61)
        await assert_serves(engine, model, 61)

    async def test_weights_come_only_while_paused(self, engine: InferenceEngine, link: Link) -> None:
        manifest = make_manifest(next(publish_ids), 1, [], BUCKET_BYTES)
        with pytest.raises(WeightTransferError, match="sampling"):
            await engine.load_weights(manifest, link[1], 1.0)

    async def test_another_sender_takes_over(self, engine: InferenceEngine) -> None:
        model = random_qwen3(seed=42)
        with closing(build_sender("collective", BUCKET_BYTES, 1)) as sender:
            await publish(engine, (sender, sender.open()), model.named_parameters(), 70)
            await assert_serves(engine, model, 70)

    records_experts = False
    """`make_engine` lets the engine record the experts of a mixture."""

    @pytest.mark.usefixtures("process_group")
    async def test_experts_from_the_trainer_are_served(
        self, tmp_path: Path, link: Link, make_engine: MakeEngine
    ) -> None:
        """One tensor for all experts of a layer in training, one for each in a publish, packed ones in the engine."""
        models = [random_qwen3_moe(seed=seed) for seed in range(2)]
        paths = [tmp_path / str(seed) for seed in range(2)]
        for model, path in zip(models, paths, strict=True):
            model.save_pretrained(path)
        trained = [weights_in_training(path) for path in paths]
        engine = await make_engine(paths[0])
        try:
            for version in (1, 2):
                sent, received = await publish(engine, link, trained[version % 2], version)
                assert sent == received is not None
                await assert_serves(engine, models[version % 2], version)
            # A missing or misshapen expert must be named, although the engine packs all experts of a layer.
            one = "model.layers.1.mlp.experts.3.up_proj.weight"
            for wrong in (
                [(name, tensor) for name, tensor in trained[1] if name != one],
                [(name, tensor[:-1] if name == one else tensor) for name, tensor in trained[1]],
            ):
                with pytest.raises(WeightTransferError, match=re.escape(one)):
                    await publish(engine, link, wrong, 3)
            await publish(engine, link, trained[1], 4)
            await assert_serves(engine, models[1], 4)
            if self.records_experts:
                await assert_experts_are_told(engine, models[1])
        finally:
            await within(engine.stop())
