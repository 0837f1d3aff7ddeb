"""What the embedded engine samples and reports against Hugging Face's own forward pass."""

import asyncio
import queue
from collections import Counter

import numpy as np
import pytest
import pytest_asyncio
import torch

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.inference.torch_engine import TorchEngine
from asyncrl.inference.torch_engine.loop import DecodeLoop
from asyncrl.inference.torch_engine.messages import Abort, Commit, Pause, Resume, Stop, Submit
from asyncrl.inference.torch_engine.runner import ModelRunner, load_model
from asyncrl.testing.engine_suite import Client, make_request, within
from asyncrl.testing.random_model import random_qwen3, write_random_qwen3
from asyncrl.types import GenerationRequest, Manifest, SamplingParams, TensorSpec
from asyncrl.weights.plan import plan_buckets
from asyncrl.weights.transports import build_sender

pytestmark = [pytest.mark.numerics, pytest.mark.asyncio(loop_scope="module")]

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 128}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_random_qwen3(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(model_path):
    engine = TorchEngine(ModelConfig(path=str(model_path)), TorchEngineConfig(device="cpu"), load_real_weights=True)
    await within(engine.start())
    yield engine
    await within(engine.stop())


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


@torch.no_grad()
def reference_greedy(model, request, max_tokens):
    ids = torch.tensor(request.prompt_ids[None].astype(np.int64))
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


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
        assert client.ids == reference_greedy(model, client.request, 48)


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
    config = ModelConfig(path=str(model_path), inference_dtype="bfloat16")
    engine = TorchEngine(config, TorchEngineConfig(device="cpu"), load_real_weights=True)
    await within(engine.start())
    clients = await run_all(engine, mixed_requests(16))
    await within(engine.stop())
    exact, rounded = random_qwen3().bfloat16().double(), random_qwen3().bfloat16()
    ours = np.concatenate([np.array(c.logprobs) - reference_logprobs(exact, c) for c in clients])
    theirs = np.concatenate([reference_logprobs(rounded, c) - reference_logprobs(exact, c) for c in clients])
    assert np.sqrt((ours**2).mean()) < 1.5 * np.sqrt((theirs**2).mean())


def send_weights(sender, manifest, model):
    return sender.send(manifest, list(model.named_parameters()), 30.0)


def specs_of(model):
    return tuple(
        TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.numel() * p.element_size())
        for name, p in model.named_parameters()
    )


async def test_published_weights_are_served(model_path):
    """From dummy weights: what is computed, such as rotary frequencies, must be right without the model's files."""
    config = ModelConfig(path=str(model_path))
    engine = TorchEngine(config, TorchEngineConfig(device="cpu"), load_real_weights=False, replica_seed=99)
    await within(engine.start())
    for version, seed in [(3, 1), (4, 2)]:
        sender = build_sender("ipc", 1 << 18, 1)
        source = await asyncio.to_thread(sender.open)
        model = random_qwen3(seed=seed)
        specs = specs_of(model)
        manifest = Manifest(version, version, specs, plan_buckets(specs, 1 << 18))
        await within(engine.pause("abort"))
        received, sent = await asyncio.gather(
            engine.load_weights(manifest, source, 30.0), asyncio.to_thread(send_weights, sender, manifest, model)
        )
        assert received == sent
        await within(engine.commit(version))
        await within(engine.resume())
        clients = await run_all(engine, mixed_requests(6, temperature=0.0))
        for client in clients:
            assert set(client.versions) == {version}
            assert client.ids == reference_greedy(model, client.request, 48)
        await asyncio.to_thread(sender.close)
    await within(engine.stop())


class RecordingRunner(ModelRunner):
    """Remembers the shape of every prefill pass."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes = []

    def prefill(self, prefill):
        self.passes.append((len(prefill.prompts), prefill.done, prefill.width))
        super().prefill(prefill)


class Driven:
    """A decode loop without its thread: after report number k it is sent `script[k]`; then it ends."""

    def __init__(self, path, requests, script, *, prefill_tokens=8):
        model = load_model(ModelConfig(path=str(path)), torch.device("cpu"), real_weights=True, seed=0)
        settings = TorchEngineConfig(num_slots=8, max_model_len=256)
        self.runner = RecordingRunner(model, settings, prefill_tokens=prefill_tokens)
        self.commands = queue.SimpleQueue()
        self.script = script
        self.reports = 0
        self.chunks = {request.request_id: [] for request in requests}
        self.open = set(self.chunks)
        for request in requests:
            self.commands.put(Submit(request))
        with torch.inference_mode():
            self.runner.warm_up()
        self.runner.passes.clear()
        DecodeLoop(self.runner, self.commands, self.on_report, num_slots=8, chunk_tokens=1, version=0).run()

    def on_report(self, report):
        for chunk in report.chunks:
            self.chunks[chunk.request_id].append(chunk)
            if chunk.finish_reason is not None:
                self.open.discard(chunk.request_id)
        for command in self.script.get(self.reports, ()):
            if callable(command):
                command(self.runner.model)
            else:
                self.commands.put(command)
        self.reports += 1
        if not self.open:
            self.commands.put(Stop())

    def ids(self, request):
        return [int(i) for chunk in self.chunks[request.request_id] for i in chunk.token_ids]


@pytest.fixture(scope="module")
def small_path(tmp_path_factory):
    return write_random_qwen3(tmp_path_factory.mktemp("small"), **SMALL)


def greedy_pair():
    short = make_request(prompt=(1, 2), max_tokens=60, temperature=0.0)
    long = make_request(prompt=np.random.default_rng(1).integers(0, 128, 100).tolist(), max_tokens=20, temperature=0.0)
    return short, long


def test_a_long_prompt_is_prefilled_in_pieces_while_others_decode(small_path):
    short, long = greedy_pair()
    model = random_qwen3(**SMALL)
    driven = Driven(small_path, [short, long], {})
    assert max(size for _, size in zip(driven.runner.passes, [1], strict=False)) == 1
    starts = [start for prompts, start, width in driven.runner.passes if width == 99]
    assert starts == list(range(0, 99, 8))
    assert driven.ids(short) == reference_greedy(model, short, 60)
    assert driven.ids(long) == reference_greedy(model, long, 20)


def test_a_publish_in_the_middle_of_a_prefill_starts_it_over(small_path):
    short, long = greedy_pair()
    new = random_qwen3(seed=5, **SMALL)

    def swap(model):
        for old, fresh in zip(model.parameters(), new.parameters(), strict=True):
            old.copy_(fresh)

    driven = Driven(small_path, [short, long], {4: [Pause("keep", 0), swap, Commit(1, 1), Resume(2)]})
    starts = [start for _, start, width in driven.runner.passes if width == 99]
    assert starts.count(0) == 2
    assert driven.ids(long) == reference_greedy(new, long, 20)
    assert {chunk.version for chunk in driven.chunks[long.request_id]} == {1}
    assert {chunk.version for chunk in driven.chunks[short.request_id]} == {0, 1}


def test_an_abort_in_the_middle_of_a_prefill_ends_only_its_request(small_path):
    short, long = greedy_pair()
    driven = Driven(small_path, [short, long], {3: [Abort((long.request_id,), 0)]})
    assert [(len(c.token_ids), c.finish_reason) for c in driven.chunks[long.request_id]] == [(0, "abort")]
    assert driven.ids(short) == reference_greedy(random_qwen3(**SMALL), short, 60)
    assert len([1 for _, _, width in driven.runner.passes if width == 99]) < 13


def test_the_samples_of_one_prompt_share_its_prefill(small_path):
    group = [make_request(prompt=(3, 1, 4, 1, 5), max_tokens=12, seed=i) for i in range(4)]
    other = [make_request(prompt=(2, 7, 1, 8), max_tokens=12, seed=i) for i in range(3)]
    driven = Driven(small_path, [*group, *other], {}, prefill_tokens=64)
    assert driven.runner.passes == [(2, 0, 4)]
    assert len({tuple(driven.ids(request)) for request in group}) > 1
    for request in (*group, *other):
        alone = Driven(small_path, [request], {}, prefill_tokens=64)
        assert alone.ids(request) == driven.ids(request)
