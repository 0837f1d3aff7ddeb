"""What the embedded engine samples and reports against Hugging Face's own forward pass."""

import asyncio
import json
from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.errors import WeightTransferError
from asyncrl.inference.torch_engine.engine import TorchEngine
from asyncrl.types import GenerationRequest, SamplingParams
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports import build_sender
from asyncrl_testing.engine_suite import Client, make_request, within
from asyncrl_testing.random_model import greedy_continuation, random_qwen3, write_random_qwen3
from tests.engines import running, torch_engine
from tests.processes import ROOT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_random_qwen3(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(model_path):
    async with running(torch_engine(model_path, real=True)) as engine:
        yield engine


async def run_all(engine, requests):
    return await asyncio.gather(*(Client(engine, request).done() for request in requests))


def mixed_requests(n, *, max_tokens=48, temperature=1.0):
    rng = np.random.default_rng(0)
    return [
        make_request(
            prompt=rng.integers(0, 128, int(rng.integers(1, 90))).tolist(),
            max_tokens=max_tokens, seed=i, temperature=temperature,
        )
        for i in range(n)
    ]  # fmt: skip


@torch.no_grad()
def reference_logprobs(model, client, temperature=1.0):
    """[T] float64 log-probabilities of the response by one full forward pass."""
    ids = torch.tensor([[*client.request.prompt_ids.tolist(), *client.ids]])
    logits = model(ids).logits[0, len(client.request.prompt_ids) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(client.ids)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_a_full_forward_pass(engine, model_path, temperature):
    exact = random_qwen3().double()
    clients = await run_all(engine, mixed_requests(80, temperature=temperature))
    for client in clients:
        reference = reference_logprobs(exact, client, temperature)
        np.testing.assert_allclose(client.logprobs, reference, rtol=0, atol=1e-5)


async def test_greedy_equals_hugging_face_generate(engine):
    model = random_qwen3()
    clients = await run_all(engine, mixed_requests(12, temperature=0.0))
    for client in clients:
        assert client.ids == greedy_continuation(model, client.request.prompt_ids, 48)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (1.5, 0, 1.0), (1.0, 6, 1.0), (1.0, 0, 0.7), (1.3, 9, 0.8)]
)
async def test_samples_follow_the_filtered_distribution(engine, temperature, top_k, top_p):
    n, prompt = 3000, np.array([9, 4, 77], np.int32)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=1)
    requests = [GenerationRequest(f"d{temperature}-{top_k}-{top_p}-{i}", prompt, sampling, seed=i) for i in range(n)]
    clients = await run_all(engine, requests)
    with torch.no_grad():
        logits = random_qwen3().double()(torch.tensor(prompt[None].astype(np.int64))).logits[0, -1].numpy()
    expected = filtered_distribution(logits, temperature, top_k, top_p)
    for client in clients:
        assert client.logprobs[0] == pytest.approx(np.log(expected[client.ids[0]]), abs=1e-5)
    counts = Counter(client.ids[0] for client in clients)
    common = [token for token in range(128) if expected[token] * n >= 5]
    rare = 1 - expected[common].sum()
    observed = np.array([counts[token] for token in common] + [n - sum(counts[token] for token in common)])
    wanted = np.append(expected[common], rare) * n
    chi_square = ((observed - wanted)[wanted > 1] ** 2 / wanted[wanted > 1]).sum()
    freedom = (wanted > 1).sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def filtered_distribution(logits, temperature, top_k, top_p):
    """[V] float64, written without a thought for speed."""
    probabilities = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-probabilities)
    if top_k:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    kept, mass = [], 0.0
    for token in order:
        if mass < top_p:
            kept.append(token)
        mass += probabilities[token]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


async def test_bfloat16_logprobs_are_those_of_a_bfloat16_forward(model_path):
    async with running(torch_engine(model_path, real=True, dtype="bfloat16")) as engine:
        clients = await run_all(engine, mixed_requests(16))
    exact, rounded = random_qwen3().bfloat16().double(), random_qwen3().bfloat16()
    ours = np.concatenate([np.array(c.logprobs) - reference_logprobs(exact, c) for c in clients])
    theirs = np.concatenate([reference_logprobs(rounded, c) - reference_logprobs(exact, c) for c in clients])
    assert np.sqrt((ours**2).mean()) < 1.5 * np.sqrt((theirs**2).mean())


async def publish(engine, model, version, staged=False):
    weights = list(model.named_parameters())
    manifest = make_manifest(version, version, [spec_of(*w) for w in weights], 1 << 18)
    manifest = replace(manifest, is_staged=staged)
    receive = engine.stage_weights if staged else engine.load_weights
    with closing(build_sender("ipc", 1 << 18, 1)) as sender:
        source = await asyncio.to_thread(sender.open)
        received, sent = await asyncio.gather(
            receive(manifest, source, 30.0), asyncio.to_thread(sender.send, manifest, weights, 30.0)
        )
    assert received == sent is not None


async def test_published_weights_are_served(model_path):
    """From dummy weights: what is computed, such as rotary frequencies, must be right without the model's files."""
    async with running(torch_engine(model_path)) as engine:
        for version, seed in [(3, 1), (4, 2)]:
            model = random_qwen3(seed=seed)
            await within(engine.pause("abort"))
            await publish(engine, model, version)
            await within(engine.commit(version))
            await within(engine.resume())
            clients = await run_all(engine, mixed_requests(6, temperature=0.0))
            for client in clients:
                assert set(client.versions) == {version}
                assert client.ids == greedy_continuation(model, client.request.prompt_ids, 48)


async def test_staged_weights_exchange_their_memory_with_the_model(model_path):
    """Also those of tied layers: nothing is copied, and nothing more is kept. A publish that is not staged finds it."""
    async with running(torch_engine(model_path)) as engine:
        places = []
        for version in range(5):
            model = random_qwen3(seed=version)
            staged = version != 3
            if staged:
                await publish(engine, model, version, staged=True)
            await within(engine.pause("keep"))
            if staged:
                await within(engine.load_staged(30.0))
                with pytest.raises(WeightTransferError, match="stage a publish first"):
                    await engine.load_staged(30.0)
            else:
                await publish(engine, model, version)
            await within(engine.commit(version))
            await within(engine.resume())
            places.append({name: p.data_ptr() for name, p in engine._runner.model.named_parameters()})
            (client,) = await run_all(engine, mixed_requests(1, temperature=0.0))
            assert client.ids == greedy_continuation(model, client.request.prompt_ids, 48)
            assert set(client.versions) == {version}
    assert places[0] == places[2] == places[3] != places[1] == places[4]
    assert not set(places[0].values()) & set(places[1].values())


async def test_an_incomplete_publish_is_refused_by_name(model_path):
    model = random_qwen3()
    del model.model.layers[3].mlp.gate_proj  # the trainer's model lacks a tensor that the replica has
    async with running(torch_engine(model_path)) as engine:
        await within(engine.pause("abort"))
        with pytest.raises(WeightTransferError, match=r"layers\.3\.mlp\.gate_proj"):
            await publish(engine, model, 1)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "jamba", "nemotron_h"])
async def test_recurrent_states_follow_their_requests(name, tmp_path):
    """Through rows that are taken, given back and moved, with prompts of one token and of many; and in scores."""
    config = AutoConfig.for_model(**json.loads((ROOT / "tests/families.json").read_text())[name])
    config.name_or_path, config.eos_token_id, config.use_cache = str(tmp_path), None, False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    settings = TorchEngineConfig(num_slots=4, chunk_tokens=4, max_model_len=128)
    rng = np.random.default_rng(1)
    requests = [
        make_request(prompt=rng.integers(3, 90, length).tolist(), max_tokens=int(rng.integers(1, 12)), seed=i)
        for i, length in enumerate([1, 7, 30, 7, 1, 12, 7, 30, 2, 1])
    ]
    async with running(TorchEngine(ModelConfig(path=str(tmp_path)), settings, load_real_weights=True)) as engine:
        clients = await run_all(engine, requests)
        scored = [
            replace(
                make_request(prompt=[*c.request.prompt_ids.tolist(), *c.ids], max_tokens=1),
                sampling=SamplingParams(max_tokens=1, score_from=len(c.request.prompt_ids)),
            )
            for c in clients
        ]
        scores = await run_all(engine, scored)
    for client, score in zip(clients, scores, strict=True):
        reference = reference_logprobs(model, client)
        np.testing.assert_allclose(client.logprobs, reference, rtol=0, atol=1e-4)
        np.testing.assert_allclose(score.logprobs, reference, rtol=0, atol=1e-4)
