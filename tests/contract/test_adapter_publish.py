"""Encoded publishes to every engine: what it samples then is of the weights with the adapters merged, or of those that
the differences make."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from asyncrl.errors import WeightTransferError
from asyncrl.weights.encodings.base import merged
from asyncrl_testing.engine_client import Client, make_request
from asyncrl_testing.publishing import Publisher
from asyncrl_testing.random_model import random_qwen3
from asyncrl_testing.weight_swap_suite import Part, check_recomputed
from tests.engines import running, sglang_engine, torch_engine, vllm_engine

pytestmark = pytest.mark.asyncio

RANK = 4


@pytest.fixture(
    params=[
        partial(torch_engine, num_slots=8, chunk_tokens=16),
        pytest.param(vllm_engine, marks=pytest.mark.slow),
        pytest.param(sglang_engine, marks=pytest.mark.sglang),
    ],
    ids=["torch", "vllm", "sglang"],
)
async def publisher(request, model_path):
    """To an engine of each kind."""
    async with running(request.param(model_path)) as engine:
        publisher = Publisher(engine)
        yield publisher
        await publisher.close()


async def assert_serves(publisher, model):
    client = Client(publisher.engine, make_request(prompt=(5, 9, 77, 3), max_tokens=24, temperature=0.0))
    await client.done()
    check_recomputed(client.request.prompt_ids, client.ids, client.logprobs, [Part(model, 0, 24)])


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


async def test_an_engine_serves_the_base_with_the_last_adapters_merged(publisher):
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
        await assert_serves(publisher, with_adapters(sent.tensors))


def trained(seed):
    """`random_qwen3` after a step in which some elements of each tensor moved."""
    model, draw = random_qwen3(), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        moved = torch.rand(parameter.shape, generator=draw) < 0.2
        parameter.data += moved * torch.randn(parameter.shape, generator=draw) * 0.1
    return model


async def test_an_engine_serves_what_differences_make(publisher):
    for seed, delta in ((1, False), (2, True), (3, True), (3, True)):
        await publisher.publish_encoded(trained(seed), publisher.next_version(), delta=delta)
        await assert_serves(publisher, trained(seed))
    await publisher.publish_broken(trained(4), publisher.next_version(), "abort")
    with pytest.raises((WeightTransferError, ExceptionGroup), match="no whole copy"):
        await publisher.publish_encoded(trained(5), publisher.next_version(), delta=True)
    for seed, delta in ((6, False), (7, True)):
        await publisher.publish_encoded(trained(seed), publisher.next_version(), delta=delta)
        await assert_serves(publisher, trained(seed))
