"""On a CPU vLLM computes with packed copies of weights: publishes replace these, in memory that is kept."""

import random
from contextlib import closing

import pytest

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import VllmEngineConfig
from asyncrl.errors import WeightTransferError
from asyncrl.inference.vllm import VllmEngine
from asyncrl.weights.transports import build_sender
from asyncrl_testing.engine_client import Client, make_request, within
from asyncrl_testing.random_model import random_qwen3, write_random_qwen3
from asyncrl_testing.weight_swap_suite import Part, check_recomputed
from tests.contract.test_vllm_quantized import publish
from tests.make import require_vllm

pytestmark = [pytest.mark.contract, pytest.mark.asyncio]

SHAPE = {"vocab_size": 1056, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
"""Its embeddings and the matrices of its MLPs have more than 1 MiB: their memory is kept."""


async def serves(engine, model):
    client = Client(engine, make_request(prompt=(5, 9, 77, 3), max_tokens=12, temperature=0.0))
    await client.done()
    check_recomputed(client.request.prompt_ids, client.ids, client.logprobs, [Part(model, 0, 12)])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_every_publish_is_served_whatever_its_order_and_whatever_failed_before(tmp_path, tied):
    require_vllm()
    shape = SHAPE | {"tie_word_embeddings": tied}
    path = write_random_qwen3(tmp_path, **shape)
    settings = VllmEngineConfig(max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, enforce_eager=True)
    engine = VllmEngine(ModelConfig(path=str(path)), settings, load_real_weights=False)
    await within(engine.start(), 120.0)
    last = "model.layers.1.mlp.down_proj.weight"
    try:
        with closing(build_sender("ipc", 1 << 18, 1)) as sender:
            for number in range(1, 5):
                model = random_qwen3(seed=number, **shape)
                weights = list(model.named_parameters())
                if number > 1:  # layers are complete late, and many at once
                    random.Random(number).shuffle(weights)
                await publish(engine, sender, number, weights)
                await serves(engine, model)
            with pytest.raises(WeightTransferError, match=r"1\.mlp\.down_proj"):
                await publish(engine, sender, 5, [w for w in weights if w[0] != last])
            misshapen = [(n, w[:-1] if n == last else w) for n, w in weights]
            with pytest.raises(WeightTransferError, match=r"1\.mlp\.down_proj"):
                await publish(engine, sender, 6, misshapen)
        with closing(build_sender("ipc", 1 << 18, 1)) as sender:
            model = random_qwen3(seed=7, **shape)
            await publish(engine, sender, 7, list(model.named_parameters()))
            await serves(engine, model)
    finally:
        await within(engine.stop(), 60.0)
