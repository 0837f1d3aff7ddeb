"""A reply divided into text and calls: the same however it arrives, and as the parsers of the environments read it."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.call_splitter import CallFormat, CallSplitter, joined_parts
from asyncrl.data.tool_calls import PARSERS, ToolCall, ToolSignature, parser_for, written
from tests.templates_of_calls import CALLS as TEMPLATE_CALLS
from tests.templates_of_calls import reply_with, template_of

TOOLS = (ToolSignature("add", "a"), ToolSignature("search", "query"), ToolSignature("now"))
TEMPLATES = [template_of(calls) for calls in TEMPLATE_CALLS.values()]
DERIVED = [parser_for("auto", template) for template in TEMPLATES]
FORMATS = st.builds(CallFormat, st.sampled_from([*sorted(PARSERS), *DERIVED]), st.just(TOOLS), st.booleans())
WORDS = st.sampled_from(
    ["hello", " ", "\n", "<tool_call>", "</tool_call>", "<add>", "</add>", "<tool", '{"name": "add"}', "{", "<|python_"]
)
CALLS = st.builds(
    written,
    st.sampled_from([tool.name for tool in TOOLS]),
    st.dictionaries(st.sampled_from("ab"), st.integers() | st.text("<a é>", max_size=4), max_size=2),
    st.sampled_from(sorted(PARSERS)),
)
OF_TEMPLATES = st.sampled_from([reply_with(t, ToolCall("add", {"a": 1}), ToolCall("now", {})) for t in TEMPLATES])
TEXT = st.lists(WORDS | CALLS | OF_TEMPLATES, max_size=8).map("".join)


def split_calls(text, form):
    """The parts of a whole reply."""
    splitter = CallSplitter(form)
    return joined_parts([*splitter.feed(text), *splitter.finish()])


@given(TEXT, FORMATS, st.lists(st.integers(0, 400), max_size=20))
def test_the_parts_do_not_depend_on_the_pieces(text, form, places):
    edges = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    splitter, parts = CallSplitter(form), []
    for a, b in pairwise(edges):
        parts += splitter.feed(text[a:b])
    parts = joined_parts([*parts, *splitter.finish()])
    assert parts == split_calls(text, form)
    if form.single:
        assert sum(isinstance(part, ToolCall) for part in parts) <= 1
    if not any(isinstance(part, ToolCall) for part in parts):
        assert "".join(parts) == text, "text without calls comes as it is"


@given(
    st.lists(
        st.tuples(
            st.text("word .", max_size=8),
            st.sampled_from(TOOLS),
            st.dictionaries(st.just("a"), st.integers(), max_size=1),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(sorted(PARSERS)),
)
def test_calls_are_those_that_the_environments_find(said, parser):
    text = "".join((before if parser != "json" else "") + written(t.name, a, parser) for before, t, a in said)
    parts = split_calls(text, CallFormat(parser, TOOLS))
    assert [p for p in parts if isinstance(p, ToolCall)] == PARSERS[parser](text, TOOLS)
    if parser != "json":
        assert "".join("".join(p for p in parts if isinstance(p, str)).split()) == "".join(
            "".join(before.split()) for before, _, _ in said
        )


def test_text_before_and_after_calls_stays_in_order_without_blanks_between():
    call = written("add", {"a": 1}, "hermes")
    text = f"let me see {call}\n{call} and then"
    add = ToolCall("add", {"a": 1})
    assert split_calls(text, CallFormat("hermes", TOOLS)) == ("let me see", add, add, "and then")
    assert split_calls(text, CallFormat("hermes", TOOLS, single=True)) == ("let me see", add)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", 'x <tool_call>{"name": 3}</tool_call>\n'),
        ("hermes", 'x <tool_call>{"name": "add"'),
        ("hermes", "a < b"),
        ("tagged", "<now>please</now> "),
        ("tagged", "<add>1"),
        ("json", '{"name": "add", "parameters": {'),
        ("json", ' {"answer": 1}'),
        ("json", "<|python"),
        ("json", "no {"),
    ],
)
def test_what_is_malformed_stays_text(parser, text):
    assert split_calls(text, CallFormat(parser, TOOLS)) == (text,)


def test_a_call_is_known_as_soon_as_it_is_complete_and_text_as_soon_as_it_can_be():
    splitter = CallSplitter(CallFormat("hermes", TOOLS))
    call = json.dumps({"name": "now", "arguments": {}})
    pieces = ["Well, ", "<to", "be> ", "<tool_call>", call, "</tool_", "call>", "!"]
    assert [splitter.feed(piece) for piece in pieces] == [
        ("Well,",), (), (" <tobe>",), (), (), (), (ToolCall("now", {}),), ("!",),
    ]  # fmt: skip
    assert splitter.finish() == ()


@pytest.mark.parametrize(("parser", "said"), [("json", ""), ("hermes", ""), ("hermes", "Well")])
def test_blanks_without_end_take_linear_time(parser, said):
    splitter, blanks = CallSplitter(CallFormat(parser, TOOLS)), " " * 200_000
    parts = [*splitter.feed(said)]
    began = time.monotonic()
    for blank in blanks:
        parts += splitter.feed(blank)
    parts = joined_parts([*parts, *splitter.finish()])
    assert time.monotonic() - began < 4
    assert parts == (said + blanks,)
