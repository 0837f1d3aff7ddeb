"""Encoded publishes to every engine: what it samples then is of the weights with the adapters merged, or of those that
the differences make."""

from types import SimpleNamespace

import pytest
import torch

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import SglangEngineConfig, TorchEngineConfig, VllmEngineConfig
from asyncrl.errors import WeightTransferError
from asyncrl.weights.encodings.base import merged
from asyncrl_testing.engine_client import Client, make_request, within
from asyncrl_testing.publishing import Publisher
from asyncrl_testing.random_model import random_qwen3, write_random_qwen3
from asyncrl_testing.weight_swap_suite import Part, check_recomputed
from tests.make import require_sglang, require_vllm

pytestmark = [pytest.mark.contract, pytest.mark.asyncio]

RANK = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_random_qwen3(tmp_path_factory.mktemp("model")))


def torch_engine(path):
    from asyncrl.inference.torch_engine.engine import TorchEngine

    settings = TorchEngineConfig(num_slots=8, chunk_tokens=16, device="cpu")
    return TorchEngine(ModelConfig(path=path), settings, load_real_weights=False)


def vllm_engine(path):
    require_vllm()
    from asyncrl.inference.vllm.engine import VllmEngine

    settings = VllmEngineConfig(max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=64 << 20, enforce_eager=True)
    return VllmEngine(ModelConfig(path=path), settings, load_real_weights=False)


def sglang_engine(path):
    require_sglang()
    from asyncrl.inference.sglang.engine import SglangEngine

    settings = SglangEngineConfig(max_model_len=512, max_running_requests=8, max_total_tokens=1 << 13)
    return SglangEngine(ModelConfig(path=path), settings, load_real_weights=False)


ENGINES = [
    torch_engine,
    pytest.param(vllm_engine, marks=pytest.mark.slow),
    pytest.param(sglang_engine, marks=pytest.mark.sglang),
]


def adapters(seed, layers):
    """Of these layers of `random_qwen3`, in the form of a publish: something with `named_parameters`."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, rows, columns in (
        ("self_attn.q_proj", 128, 128),
        ("self_attn.k_proj", 64, 128),
        ("mlp.up_proj", 384, 128),
    ):
        for layer in layers:
            found[f"model.layers.{layer}.{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=draw) * 0.1
            found[f"model.layers.{layer}.{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=draw) * 0.3
    return SimpleNamespace(named_parameters=found.items, tensors=found)


def with_adapters(tensors):
    """Hugging Face's own model with them merged."""
    model = random_qwen3()
    for name, parameter in model.named_parameters():
        parameter.data = merged(name, parameter.data, tensors)
    return model


async def full(publisher):
    await publisher.publish(random_qwen3(seed=9), publisher.next_version(), "abort")


async def strange(publisher):
    ends = (".lora_A.weight", ".lora_B.weight")
    absent = SimpleNamespace(named_parameters={f"absent{end}": torch.zeros(RANK, RANK) for end in ends}.items)
    with pytest.raises((WeightTransferError, ExceptionGroup), match="absent"):
        await publisher.publish(absent, publisher.next_version(), "abort")


@pytest.mark.parametrize("make_engine", ENGINES)
async def test_an_engine_serves_the_base_with_the_last_adapters_merged(path, make_engine):
    engine = make_engine(path)
    await within(engine.start(), 240.0)
    publisher = Publisher(engine)
    try:
        # over dummy weights; over the same adapters; over other weights; over others adapters; after one that failed
        for seed, layers, before in (
            (0, (0, 2), None),
            (1, (0, 2), None),
            (2, (0, 2), full),
            (3, (1,), None),
            (4, (1,), strange),
        ):
            await before(publisher) if before else None
            sent = adapters(seed, layers)
            await publisher.publish(sent, publisher.next_version(), "abort")
            client = Client(engine, make_request(prompt=(5, 9, 77, 3), max_tokens=24, temperature=0.0))
            await client.done()
            parts = [Part(with_adapters(sent.tensors), 0, 24)]
            check_recomputed(client.request.prompt_ids, client.ids, client.logprobs, parts)
    finally:
        await publisher.close()
        await within(engine.stop(), 60.0)


def trained(seed):
    """`random_qwen3` after a step in which some elements of each tensor moved."""
    model, draw = random_qwen3(), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        moved = torch.rand(parameter.shape, generator=draw) < 0.2
        parameter.data += moved * torch.randn(parameter.shape, generator=draw) * 0.1
    return model


@pytest.mark.parametrize("make_engine", ENGINES)
async def test_an_engine_serves_what_differences_make(path, make_engine):
    engine = make_engine(path)
    await within(engine.start(), 240.0)
    publisher = Publisher(engine)

    async def serves(seed):
        client = Client(engine, make_request(prompt=(5, 9, 77, 3), max_tokens=24, temperature=0.0))
        await client.done()
        check_recomputed(client.request.prompt_ids, client.ids, client.logprobs, [Part(trained(seed), 0, 24)])

    try:
        for seed, delta in ((1, False), (2, True), (3, True), (3, True)):
            await publisher.publish_encoded(trained(seed), publisher.next_version(), delta=delta)
            await serves(seed)
        await publisher.publish_broken(trained(4), publisher.next_version(), "abort")
        with pytest.raises((WeightTransferError, ExceptionGroup), match="no whole copy"):
            await publisher.publish_encoded(trained(5), publisher.next_version(), delta=True)
        for seed, delta in ((6, False), (7, True)):
            await publisher.publish_encoded(trained(seed), publisher.next_version(), delta=delta)
            await serves(seed)
    finally:
        await publisher.close()
        await within(engine.stop(), 60.0)
