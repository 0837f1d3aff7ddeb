import numpy as np
import pytest

from asyncrl.inference.shared.request_checks import misfit
from asyncrl.serving.errors import ApiError
from asyncrl.serving.protocol import parse_chat, parse_completion
from asyncrl.types import GenerationRequest, SamplingParams

pytestmark = pytest.mark.unit

MESSAGES = [{"role": "user", "content": "hi"}]


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-40),
        ("temperature", 0.009),
        ("temperature", 2.1),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1e-300),
        ("top_p", 1.5),
        ("top_p", float("inf")),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 10**400),
        ("n", 0),
        ("n", 10_000),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop", 5),
        ("stop", ["a", "b" * 257]),
        ("stream_options", {"include_usage": 1}),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [5] * 1025),
        ("seed", "x"),
        ("stream", "yes"),
        ("model", 5),
    ],
)
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
        ({"messages": [*MESSAGES, {"role": "user", "content": "x", "name": "Ann"}]}, "messages[1].name"),
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
    ("prompt", "parsed"),
    [
        ("a b", ["a b"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2.0], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
    ],
)
def test_the_shapes_of_a_prompt(prompt, parsed):
    assert parse_completion({"prompt": prompt}).prompt == parsed


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
