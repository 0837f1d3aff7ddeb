"""Tool calls in the text of the policy."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.tool_calls import (
    PARSERS,
    MalformedCall,
    ToolCall,
    ToolSignature,
    described,
    parse_between,
    parse_hermes,
    parse_json,
    parse_tagged,
    parser_for,
)
from tests.environments import QWEN

TOOLS = (ToolSignature("calculator", "expression"), ToolSignature("search", "query"), ToolSignature("now"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(min_size=1), JSON, max_size=3)
PROSE = st.text(alphabet=st.characters(exclude_characters="<{"), max_size=20)


def no_tag(value):
    return "</tool_call>" not in json.dumps(value) and "</calculator>" not in json.dumps(value)


@given(st.lists(st.tuples(PROSE, st.text(min_size=1).filter(no_tag), ARGUMENTS.filter(no_tag)), max_size=4))
def test_hermes_calls_come_back_in_order(calls):
    text = "".join(
        f"{prose}<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for prose, name, arguments in calls
    )
    assert parse_hermes(text, TOOLS) == [ToolCall(name, arguments) for _, name, arguments in calls]


@given(st.lists(st.tuples(st.text(), ARGUMENTS), min_size=1, max_size=3), st.sampled_from(["", ";", "\n", " ; "]))
def test_json_calls_come_back_in_order(calls, between):
    text = between.join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    assert parse_json(text, TOOLS) == [ToolCall(name, arguments) for name, arguments in calls]


@given(PROSE, st.text(alphabet=st.characters(exclude_characters="<{"), min_size=1).map(str.strip), PROSE)
def test_a_tagged_text_is_the_first_argument(before, argument, after):
    calls = parse_tagged(f"{before}<search>{argument}</search>{after}<calculator>1+1</calculator>", TOOLS)
    assert calls == [ToolCall("search", {"query": argument}), ToolCall("calculator", {"expression": "1+1"})]


@given(st.text(), st.sampled_from(sorted(PARSERS)))
def test_no_text_is_too_strange(text, parser):
    for call in PARSERS[parser](text, TOOLS) + PARSERS[parser](f"<tool_call>{text}<calculator>{text}", TOOLS):
        assert isinstance(call, MalformedCall) or isinstance(call.arguments, dict)


@pytest.mark.parametrize(
    ("parser", "text", "error"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {}', "not closed"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}</tool_call>', "not JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": "a", "arguments": 3}</tool_call>', "no object"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "nested"),
        ("json", '{"name": "a", "parameters": {', "not JSON"),
        ("tagged", "<calculator>1+1", "not closed by </calculator>"),
        ("tagged", "<now>please</now>", "no arguments"),
    ],
)
def test_what_is_meant_as_a_call_and_is_none_says_why(parser, text, error):
    [call] = PARSERS[parser](text, TOOLS)
    assert isinstance(call, MalformedCall)
    assert error in call.error


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "the answer is 4"),
        ("json", 'Answer: {"name": "x"}'),
        ("json", '{"answer": 4}'),
        ("tagged", "<unknown>1</unknown> <b>4</b>"),
    ],
)
def test_an_answer_is_no_call(parser, text):
    assert PARSERS[parser](text, TOOLS) == []


def test_the_ways_that_models_nest_a_call():
    nested = {"type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}}
    assert parse_json(json.dumps(nested), ()) == [ToolCall("a", {"x": 1})]
    assert parse_json('<|python_tag|>{"name": "a", "parameters": {"x": 1}}', ()) == [ToolCall("a", {"x": 1})]
    assert parse_tagged('<calculator>{"expression": "2"}</calculator>', TOOLS) == [
        ToolCall("calculator", {"expression": "2"})
    ]


def test_a_single_tool_may_be_called_in_every_nesting():
    (tool,) = (t for t in TOOLS if t.name == "calculator")
    for text in (
        '{"function": {"name": "calculator", "arguments": {"expression": "2"}}}',
        '{"name": "calculator", "arguments": {"expression": "2"}}',
        '{"expression": "2"}',
        "2",
    ):
        assert parse_between(text, [tool], "<a>", "</a>") == ToolCall("calculator", {"expression": "2"})


def test_auto_follows_the_chat_template():
    assert parser_for("auto", QWEN) == "hermes"
    assert parser_for("auto", "no tools") == "hermes"
    assert parser_for("tagged", QWEN) == "tagged"


def test_the_description_teaches_the_format_that_is_parsed():
    schema = {"type": "function", "function": {"name": "calculator", "description": "d", "parameters": {}}}
    for name, parse in PARSERS.items():
        text = described([schema], name)
        shown = text.split("write ")[1].split(" and wait")[0]
        call = shown.replace("NAME", "calculator").replace("{...}", '{"expression": "1"}').replace("ARGUMENTS", "1")
        assert parse(call, TOOLS) == [ToolCall("calculator", {"expression": "1"})]
