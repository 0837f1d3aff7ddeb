import asyncio
import json
import math
import re
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import jsonschema
import numpy as np
import openai
import pytest

from asyncrl.chat import anthropic, responses
from asyncrl.chat.fields import MAX_DEPTH, ApiError, json_value, parsed
from asyncrl.chat.reply import call_id
from asyncrl.config.model import ModelConfig
from asyncrl.data.call_splitter import CallFormat
from asyncrl.data.stop_strings import StopTable
from asyncrl.data.tool_calls import ToolCall, ToolSignature
from asyncrl.inference.shared.request_checks import misfit
from asyncrl.serving.answer import Question
from asyncrl.serving.bodies import PING_S, DialectBodies
from asyncrl.serving.choice import Choice, ChoiceForm, Delta, Finished
from asyncrl.serving.model_text import ModelText
from asyncrl.serving.protocol import ChatRequest, CompletionRequest, forced_call
from asyncrl.types import GenerationRequest, SamplingParams
from tests.serving import byte_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
parse_chat, parse_completion = partial(parsed, ChatRequest), partial(parsed, CompletionRequest)


def refused(parse, body):
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.status == 400
    error = caught.value.body()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "add"}]),
        ("logit_bias", {"1": 2}),
        ("top_logprobs", 3),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("best_of", 2),
        ("suffix", "x"),
        ("echo", True),
        ("logprobs", 2),
        ("prompt_logprobs", 0),
        ("something_new", 1),
        ("frequency_penalty", False),
        ("best_of", True),
        ("echo", 0),
    ],
)
def test_what_is_not_served_is_refused_by_name(name, value):
    for parse, body in ((parse_chat, {"messages": MESSAGES}), (parse_completion, {"prompt": "a"})):
        error = refused(parse, body | {name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert name in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "add"}}]),
        ("tool_choice", "auto"),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_completions_have_no_tools(name, value):
    assert parse_chat({"messages": MESSAGES, name: value}).n == 1
    assert refused(parse_completion, {"prompt": "a", name: value})["code"] == "unsupported_parameter"


def test_values_that_ask_for_nothing_are_no_reason_to_refuse():
    body = {
        "messages": MESSAGES, "tools": [], "tool_choice": None, "logit_bias": {}, "response_format": {"type": "text"},
        "frequency_penalty": 0.0, "presence_penalty": 0, "top_logprobs": 0, "user": "me", "metadata": {"a": 1}, "n": 1,
    }  # fmt: skip
    assert parse_chat(body).n == 1


IMPOSSIBLE = {
    "temperature": (-1, "hot", True, math.nan, math.inf, 1e-40, 0.009, 2.1, 10**400),
    "top_p": (0, 1e-300, 1.5, math.inf),
    "top_k": (-2, 2**31, 10**400),
    "n": (0, 10_000, True),
    "max_tokens": (0, 1.5),
    "min_tokens": (-1,),
    "stop": ([""], 5, ["a", "b" * 257]),
    "stream_options": ({"include_usage": 1},),
    "stop_token_ids": (["a"], [-1], [5] * 1025),
    "seed": ("x",),
    "stream": ("yes",),
    "model": (5,),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in IMPOSSIBLE for value in IMPOSSIBLE[name]])
def test_impossible_values_are_refused_by_name(name, value):
    error = refused(parse_completion, {"prompt": "a", name: value})
    assert (error["param"], error["code"]) == (name, "invalid_value")
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "top_p": 1, "top_k": 0},
        {"temperature": 0.01, "top_p": 1e-6, "top_k": 2**31 - 1, "stop_token_ids": [5] * 1024},
        {"temperature": 2, "top_p": 1.0},
    ],
)
def test_the_ends_of_the_ranges_are_served_by_every_engine(options):
    asked = parse_completion({"prompt": "a", **options})
    assert {name: getattr(asked, name) for name in options if name != "stop_token_ids"} == {
        name: value for name, value in options.items() if name != "stop_token_ids"
    }
    sampling = SamplingParams(temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, max_tokens=1)
    request = GenerationRequest("r", np.zeros(1, np.int32), sampling, seed=0)
    assert misfit(request, engine="torch", max_model_len=8, vocab_size=8) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"messages": MESSAGES, "logprobs": 0}, "logprobs"),
        ({"messages": MESSAGES, "logprobs": "yes"}, "logprobs"),
        ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": MESSAGES, "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ],
)
def test_chats_that_cannot_be_answered(body, param):
    assert refused(parse_chat, body)["param"] == param


def test_a_body_must_be_an_object():
    assert refused(parse_chat, [1])["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a b", ["a b"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2.0], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
    ],
)
def test_the_shapes_of_a_prompt(prompt, expected):
    assert parse_completion({"prompt": prompt}).prompt == expected


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [""], [1, "a"], [[1], 2], [True], {"a": 1}, [-1]])
def test_prompts_that_are_none(prompt):
    assert refused(parse_completion, {"prompt": prompt})["param"] == "prompt"


def test_defaults_and_synonyms():
    chat = parse_chat({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]})
    assert chat.messages[0].content == "hi"
    assert chat.max_tokens is None
    assert (chat.temperature, chat.top_p, chat.top_k) == (1.0, 1.0, 0)
    assert parse_chat({"messages": MESSAGES, "max_completion_tokens": 7}).longest == 7
    completion = parse_completion({"prompt": "a", "stop": "x", "logprobs": 0, "top_k": -1})
    assert completion.max_tokens == 16
    assert completion.stop == ["x"]
    assert completion.logprobs
    assert completion.top_k == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, 'messages: it is missing; send [{"role": "user", "content": "..."}]'),
        ({"messages": []}, 'messages: [] cannot be served; send [{"role": "user", "content": "..."}]'),
        ({"messages": [{"role": "user"}]}, "messages: messages[0].content: it is missing; send it"),
        ({"messages": MESSAGES, "n": "2"}, "n: '2' cannot be served; it should be a valid integer"),
        ({"messages": MESSAGES, "temperature": 3}, "temperature: 3 cannot be served; choose 0, or 0.01 to 2.0"),
        ({"messages": MESSAGES, "stop": ["a", 5]}, "stop: stop[1]: 5 cannot be served; it should be a valid string"),
        (
            {"messages": MESSAGES, "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats: this server does not support it; leave the field out",
        ),
    ],
)
def test_a_refusal_says_what_was_found_where_and_what_to_do(body, message):
    assert refused(parse_chat, body)["message"] == message


# -- JSON and the schemas of tools -------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["1", '"[[[{{{"', r'"\\\"[[["'])
def test_json_is_read_down_to_the_deepest_level_that_is_served(inner):
    def nested(levels):
        lists, objects = levels // 2, levels - levels // 2
        return "[" * lists + '{"a]": ' * objects + inner + "}" * objects + "]" * lists

    assert json_value(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))
    flat = "[" + ",".join(["[[]]"] * 100) + "]"
    assert json_value(flat) == json.loads(flat)
    for levels in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(ValueError, match="deeper than 64 levels"):
            json_value(nested(levels))
    with pytest.raises(ValueError, match="Expecting"):
        json_value("[1,")


def test_the_arguments_of_an_earlier_call_are_not_nested_deeper_either():
    def body(levels):
        arguments = '{"a": ' * levels + "1" + "}" * levels
        call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"messages": [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]}

    assert parse_chat(body(MAX_DEPTH)).messages[1].model_dump()["tool_calls"]
    for levels in (MAX_DEPTH + 1, 300, 100_000):
        assert "at most 64 levels" in refused(parse_chat, body(levels))["message"]


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TREE = {"type": "object", "properties": {"value": {"type": "integer"}, "left": {"$ref": "#"}}, "required": ["value"]}
TEXTS = {"properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"], "$defs": {"X": {"type": "string"}}}
NUMBERS = {
    "properties": {"x": {"anyOf": [{"$ref": "#/definitions/X"}, {"$ref": "#/$defs/X"}]}},
    "required": ["x"],
    "definitions": {"X": {"const": 1}},
    "$defs": {"X": {"const": 2}},
}
ODD = {"type": "object", "$defs": 5, "properties": {"$ref": {"type": "string"}}}


@pytest.mark.parametrize("choice", ["required", "one"])
def test_the_schema_of_a_call_keeps_the_references_of_each_tool(choice):
    tools = [tool("tree", TREE), tool("texts", TEXTS), tool("numbers", NUMBERS), tool("odd", ODD), tool("bare", None)]
    calls = {
        "tree": ({"value": 1, "left": {"value": 2}}, {"value": 1, "left": {"name": "tree", "arguments": {"value": 1}}}),
        "texts": ({"x": "a"}, {"x": 1}),
        "numbers": ({"x": 2}, {"x": "a"}),
        "odd": ({"$ref": "#"}, {"$ref": 1}),
        "bare": ({}, []),
    }
    for name, (good, bad) in calls.items():
        named = "required" if choice == "required" else {"type": "function", "function": {"name": name}}
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": named}
        check = jsonschema.Draft202012Validator(forced_call(parse_chat(body), tools))
        assert check.is_valid({"name": name, "arguments": good})
        assert not check.is_valid({"name": name, "arguments": bad})
        assert not check.is_valid({"name": "other", "arguments": good})
        assert check.is_valid({"name": "bare", "arguments": {}}) == (choice == "required" or name == "bare")


def test_ids_of_calls_do_not_meet():
    ids = [call_id() for _ in range(20_000)]
    assert len(set(ids)) > 19_990, "20 bits would repeat about 190 of them"
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", made) for made in ids)


def test_many_tools_cost_all_choices_of_a_request_as_much_as_one():
    tools = tuple(ToolSignature(f"{number}{'x' * 120}") for number in range(1000))
    text = ModelText(byte_tokenizer(), ModelConfig(path=str(Path(__file__).parent)), max_model_len=512)
    began = time.monotonic()
    form = ChoiceForm(text, parse_chat({"messages": MESSAGES}), CallFormat("tagged", tools))
    one_s = time.monotonic() - began
    for index in range(128):
        Choice(index, np.zeros(4, np.int32), text, form, ())
    assert time.monotonic() - began < 5 * one_s + 1
    assert isinstance(form.calls.openings, StopTable)


# -- dialects ----------------------------------------------------------------------------------------------------


def test_a_long_turn_of_the_assistant_takes_linear_time():
    items = [{"type": "message", "role": "user", "content": "go"}]
    for number in range(85_000):
        items.append({"type": "function_call", "name": "f", "arguments": "{}", "call_id": str(number)})
        items.append({"role": "assistant", "content": "ab"})
    began = time.monotonic()
    user, said = responses.to_chat({"input": items})["messages"]
    assert time.monotonic() - began < 3
    assert user == {"role": "user", "content": "go"}
    assert said["content"] == "ab" * 85_000
    assert [call["id"] for call in said["tool_calls"]] == [str(number) for number in range(85_000)]


IMAGE = {"type": "image", "source": {}}
HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("dialect", "body", "param"),
    [
        (responses, {"input": [HI, HI, {"role": "user"}]}, "input[2].content"),
        (responses, {"input": [HI, {"role": "user", "content": ["hi"]}]}, "input[1].content[0]"),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        (responses, {"input": [HI, {"role": "assistant", "content": 5}]}, "input[1].content"),
        (responses, {"input": [HI, {"content": "hi"}]}, "input[1].role"),
        (responses, {"input": [HI, {"type": "function_call", "arguments": "{}"}]}, "input[1].name"),
        (responses, {"input": [HI, {"type": "function_call_output", "output": [IMAGE]}]}, "input[1].output[0]"),
        (anthropic, {"messages": [HI, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
        (
            anthropic,
            {"messages": [HI, {"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
            "messages[1].content[0].content[0]",
        ),
        (anthropic, {"messages": [HI], "system": [IMAGE]}, "system[0]"),
    ],
)
def test_a_dialect_names_what_is_no_text_as_its_client_wrote_it(dialect, body, param):
    error = refused(dialect.to_chat, {"max_tokens": 5, **body} if dialect is anthropic else body)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_fields_of_responses_that_ask_for_nothing_are_taken():
    nothing = {"reasoning": {"effort": "high", "summary": "auto"}, "stream_options": {"include_obfuscation": False}}
    nothing |= {"store": True, "client_metadata": {"a": "b"}, "text": {"verbosity": "low"}, "tools": [{"type": "mcp"}]}
    assert responses.to_chat({"input": "hi", "stream": True, **nothing})["messages"] == [HI]
    for asked in ({"background": True}, {"stream_options": {"include_obfuscation": True}}):
        assert refused(responses.to_chat, {"input": "hi", **asked})["param"] == next(iter(asked))


def test_what_claude_code_and_codex_send_is_taken():
    """Thoughts go to the template; tools of the provider are left out, and the choice of one."""
    said = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "yes"}]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
    messages.append({"role": "system", "content": "be brief"})
    hints = {"thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "output_config": {"effort": "high"}}
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    made = anthropic.to_chat({"max_tokens": 5, "messages": messages, "tools": tools, **hints})
    said = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert made["messages"] == [HI, said, {"role": "system", "content": "be brief"}]
    assert made["tools"] == []
    chosen = {"tools": tools, "tool_choice": {"type": "tool", "name": "web_search"}}
    assert "tool_choice" not in anthropic.to_chat({"max_tokens": 5, "messages": messages, **chosen})
    assert "tool_choice" not in responses.to_chat({"input": "hi", "tool_choice": {"type": "web_search_preview"}})
    items = [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": []}]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    replied = [HI, thought, {"role": "assistant", "content": "yes"}]
    assert responses.to_chat({"input": replied})["messages"] == [HI, said]
    assert responses.to_chat({"input": items, "tools": [{"type": "namespace", "name": "n"}]})["messages"] == [HI]
    body = {"messages": [{"role": "user", "content": "x", "name": "Ann"}], "reasoning_effort": "low", "store": True}
    assert parse_chat(body).messages[0].name == "Ann"


def test_a_tool_result_that_is_an_error_says_so():
    def result(**fields):
        block = {"type": "tool_result", "tool_use_id": "t", "content": "no such file", **fields}
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
        return anthropic.to_chat(body)["messages"][0]["content"]

    assert result(is_error=True) == "Error: no such file"
    assert result(is_error=False) == result() == "no such file"


def frames_of_a_long_call(reply):
    """What a stream sends whose model writes a call for 21 s, a token each second."""
    now = [100.0]
    question = Question((np.zeros(3, np.int32),), parse_chat({"messages": MESSAGES}))
    bodies = DialectBodies(question, reply("tiny", {}), lambda: now[0])
    frames = []
    for second in range(22):
        now[0] = 100.0 + second
        frames.append([*bodies.frames(Delta(0, ("Well",) if second == 0 else (), (second,), (), 0, 0))])
    call = ToolCall("add", {"a": 1})
    frames.append([*bodies.frames(Finished(0, (call,), "tool_calls", None, (), 22, 0, 0))])
    return frames


@pytest.mark.parametrize(
    ("reply", "ping"),
    [
        (responses.ResponsesReply, 'event: response.in_progress\ndata: {"type": "response.in_progress", '),
        (anthropic.MessagesReply, 'event: ping\ndata: {"type": "ping"}\n\n'),
    ],
)
def test_a_stream_is_not_silent_while_a_call_is_written(reply, ping):
    frames = frames_of_a_long_call(reply)
    told = {second: made for second, made in enumerate(frames[1:-1], 1) if made}
    assert all(made[0].startswith(ping) for made in told.values())
    assert [(second, len(made)) for second, made in told.items()] == [(5, 1), (10, 1), (15, 1), (20, 1)]
    assert PING_S == 5


@asynccontextmanager
async def replaying(frames):
    """The URL of a server that answers everything with this stream of events."""
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write((head + "".join(made for group in frames for made in group)).encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_openais_client_skips_what_keeps_a_stream_alive():
    async with replaying(frames_of_a_long_call(responses.ResponsesReply)) as url:
        client = openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0, timeout=20)
        events = [event.type async for event in await client.responses.create(model="m", input="x", stream=True)]
    assert events[-1] == "response.completed"
    assert "response.function_call_arguments.done" in events


async def test_anthropics_client_skips_what_keeps_a_stream_alive():
    theirs = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")
    async with replaying(frames_of_a_long_call(anthropic.MessagesReply)) as url:
        client = theirs.AsyncAnthropic(base_url=url, api_key="k", max_retries=0, timeout=20)
        async with client.messages.stream(model="m", max_tokens=5, messages=MESSAGES) as stream:
            message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use"]
