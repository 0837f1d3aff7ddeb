"""vLLM against the conformance suite of engines."""

import asyncio
import json
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from asyncrl.chat.fields import parsed
from asyncrl.config.rollout import VllmEngineConfig
from asyncrl.errors import BadRequest, GenerationError
from asyncrl.serving.protocol import ChatRequest, forced_call
from asyncrl.types.models import settle
from asyncrl_testing.engine_client import Client, complete, make_request, within
from asyncrl_testing.random_model import write_random_qwen3
from tests.engines import SharedEngine, running, vllm_engine
from tests.serving import byte_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestVllmEngine(SharedEngine):
    deterministic = False
    stream_interval = VllmEngineConfig().stream_interval
    build = staticmethod(partial(vllm_engine, real=True, max_num_seqs=32))

    async def test_sleep_is_refused_where_it_was_not_asked_for(self, engine):
        for call in (engine.sleep(), engine.wake_up()):
            with pytest.raises(GenerationError, match="enable_sleep_mode"):
                await within(call)

    async def test_requests_that_had_no_token_begin_anew_after_a_pause(self, engine):
        """They would start with the weights that came meanwhile, and the prefix cache of those before."""
        clients = [Client(engine, make_request(prompt=(7,) * 200, max_tokens=4, seed=i)) for i in range(40)]
        while engine.health().running == 0:
            await asyncio.sleep(0)
        await within(engine.pause("keep"))
        assert engine.health().running == sum(0 < len(c.ids) < 4 for c in clients)
        await within(engine.commit(3))
        await within(engine.resume())
        for client in clients:
            await client.done()
            assert (len(client.ids), client.finish_reasons) == (4, ["length"])
            assert client.versions == sorted(client.versions)


@pytest.mark.slow
async def test_rotary_factors_follow_the_longest_sequence_as_in_training(tmp_path):
    """longrope, in a response that is short enough for the short factors."""
    lists = {"short_factor": [1.0] * 16, "long_factor": [4.0 + i for i in range(16)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, **lists}
    config = Phi3Config(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.2, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    async with running(vllm_engine(tmp_path, real=True, max_model_len=64, max_num_seqs=4)) as engine:
        client = await complete(engine, prompt=(5, 6, 7), max_tokens=8)
    settle(config, 64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, *client.ids]])).logits[0, 2:-1]
    assert client.logprobs == pytest.approx(logits.log_softmax(-1)[range(8), client.ids].tolist(), abs=1e-3)


@pytest.mark.slow
async def test_a_json_schema_guides_a_response_where_the_tokenizer_is_loaded(tmp_path):
    path = write_random_qwen3(tmp_path, vocab_size=260, eos_token_id=256)
    byte_tokenizer().save_pretrained(path)
    async with running(vllm_engine(path, real=True, max_num_seqs=4, structured_outputs=True)) as engine:
        call = {"type": "object", "properties": {"name": {"const": "add"}}, "required": ["name"]}
        schema = json.dumps(call | {"additionalProperties": False})
        clients = [
            Client(engine, make_request(max_tokens=200, seed=i, stop=(256,), json_schema=schema)) for i in range(3)
        ]
        for client in clients:
            await client.done()
            assert client.finish_reasons == ["stop"]
            assert json.loads(bytes(i for i in client.ids if i < 256)) == {"name": "add"}
        tree = {"properties": {"left": {"$ref": "#"}, "x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"const": 7}}}
        tools = [{"function": {"name": name, "parameters": tree}} for name in ("a", "b")]
        asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
        forced = json.dumps(forced_call(parsed(ChatRequest, asked), tools))
        begun = await Client(engine, make_request(max_tokens=4, json_schema=forced)).done()
        assert bytes(begun.ids).startswith(b"{"), "references of tools lead somewhere"
        for refused in ('{"type": 5}', '{"$ref": "#/nowhere"}', '{"type": "string", "pattern": "["}'):
            with pytest.raises(BadRequest, match="vLLM refuses the schema"):
                await within(Client(engine, make_request(json_schema=refused)).done())
        with pytest.raises(GenerationError, match="first token"):
            await within(Client(engine, make_request(json_schema=schema, first_position=2)).done())
        free = await Client(engine, make_request(max_tokens=8)).done()
        assert len(free.ids) == 8, "a request without a schema is not guided"
