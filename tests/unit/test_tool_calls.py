"""Tool calls in the text of the policy."""

import json
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.call_splitter import CallFormat, CallSplitter, joined_parts
from asyncrl.data.call_values import signature_of
from asyncrl.data.template_calls import TemplateFormat
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
    shown,
    template_text,
    tools_for,
    with_tools,
    written,
)
from tests.environments import QWEN
from tests.templates_of_calls import CALLS, EACH, END, JSON, NAME, OBJECT, PAIRS, reply_with, template_of

TOOLS = (ToolSignature("calculator", "expression"), ToolSignature("search", "query"), ToolSignature("now"))
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(min_size=1), ANY_VALUE, max_size=3)
PROSE = st.text(alphabet=st.characters(exclude_characters="<{"), max_size=20)


def split_calls(pieces, form):
    splitter, parts = CallSplitter(form), []
    for piece in pieces:
        parts += splitter.feed(piece)
    return joined_parts([*parts, *splitter.finish()])


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


# -- formats that are derived from what a chat template renders --------------------------------------------------------


PROPERTIES = {
    "code": {"type": "string"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "mode": {"enum": ["1", "2"]},
    "number": {"type": "integer"},
    "items": {"type": "array"},
    "either": {"type": ["integer", "string"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
SCHEMA = {"type": "function", "function": {"name": "run", "description": "d", "parameters": PARAMETERS}}
RUNNABLE = (signature_of("run", PARAMETERS), signature_of("now", {}))
MADE = (
    ToolCall("run", {"code": "42", "number": 42}),
    ToolCall("run", {"code": '  if x < 1:\n      print("{}")\n'}),
    ToolCall("now", {}),
    ToolCall("run", {"code": "true", "items": ["a, b", {"c": None}], "either": 3}),
)
FORMS = {name: parser_for("auto", template_of(calls)) for name, calls in CALLS.items()}
families = pytest.mark.parametrize("name", sorted(CALLS))


@families
@pytest.mark.parametrize("calls", [*[(call,) for call in MADE], MADE], ids=lambda calls: str(len(calls)))
def test_calls_that_a_template_writes_are_read(name, calls):
    assert isinstance(FORMS[name], TemplateFormat)
    assert PARSERS[FORMS[name]](reply_with(template_of(CALLS[name]), *calls), RUNNABLE) == [*calls]


@families
def test_streamed_calls_are_those_that_the_environments_find_wherever_the_text_is_cut(name):
    text = "Let me see. " + reply_with(template_of(CALLS[name]), *MADE[:3])
    assert PARSERS[FORMS[name]](text, RUNNABLE) == [*MADE[:3]]
    for cut in range(len(text)):
        assert split_calls([text[:cut], text[cut:]], CallFormat(FORMS[name], RUNNABLE)) == ("Let me see.", *MADE[:3])
    assert split_calls(text, CallFormat(FORMS[name], RUNNABLE, single=True)) == ("Let me see.", MADE[0])


@given(st.sampled_from(sorted(FORMS)), st.text("<>[]{}()=:\"', \nab1\\", max_size=30), st.integers(0, 80))
def test_no_text_is_too_strange_for_a_derived_format(name, said, cut):
    text = reply_with(template_of(CALLS[name]), *MADE[:2])
    for broken in (text[:cut] + said + text[cut:], text[:cut] + said, said + text[cut:]):
        for call in PARSERS[FORMS[name]](broken, RUNNABLE):
            assert isinstance(call, MalformedCall) or isinstance(call.arguments, dict)
        parts = split_calls([broken], CallFormat(FORMS[name], RUNNABLE))
        assert parts == split_calls(broken, CallFormat(FORMS[name], RUNNABLE))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3-coder", "<tool_call>\n<function=run>\n<parameter=code>\nx\n</parameter>\n</function>"),
        ("qwen3-coder", "<tool_call>\n<function=run>\n<parameter=code>\nx\n</function>\n</tool_call>"),
        (
            "qwen3-coder",
            "<tool_call>\n<function=run>\n<parameter=code>\nx\n</parameter>\nwell</function></tool_call>",
        ),
        ("qwen3-coder", '<tool_call>{"name": "run", "arguments": {}}</tool_call>'),
        ("qwen3-coder", "<tool_call></tool_call>"),
        ("glm", "<tool_call>run"),
        ("glm", "<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>x</arg_value>"),
        ("minimax", "<mm:tool_call>now</mm:tool_call>"),
        ("minimax", '<mm:tool_call>\n<invoke name="now">\n</invoke>'),
        ("deepseek", "<calls><call>function<sep>run\n```json\n{'code': 1}\n```</call></calls>"),
        ("kimi", "<section><call>functions.run:0<args>[1]</call></section>"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", '[TOOL_CALLS] [{"name": "run"'),
        ("mistral-v13", '[TOOL_CALLS]run[ARGS]{"code": "x"} and then'),
        ("gpt-oss", ' to=functions.run<|message|>{"code": '),
        ("gemma", "<|tool_call>call:run{code:<|q|>x}<tool_call|>"),
        ("cohere", '<|START_ACTION|>[{"name": "run", "parameters": {}}]<|END_ACTION|>'),
        ("lfm", "<|calls|>[run(1)]<|/calls|>"),
        ("lfm", "<|calls|>[run(code=open('x'))]<|/calls|>"),
        ("lfm", "<|calls|>run<|/calls|>"),
        ("brackets", "[run run]\n[[code]]x[/run]"),
    ],
)
def test_a_broken_call_is_told_and_shown_the_format(name, text):
    *_, call = PARSERS[FORMS[name]](f"Well. {text}", RUNNABLE)
    assert isinstance(call, MalformedCall)
    assert shown(FORMS[name]) in call.error
    assert split_calls(f"Well. {text}", CallFormat(FORMS[name], RUNNABLE)) == (f"Well. {text}",)


def test_a_closing_text_that_ends_the_turn_may_be_missing():
    text = '<|channel|>commentary to=functions.run <|constrain|>json<|message|>{"code": "42"}'
    call = ToolCall("run", {"code": "42"})
    for whole in (text, f"{text}<|call|>"):
        assert PARSERS[FORMS["gpt-oss"]](whole, RUNNABLE) == [call]
        assert split_calls(whole, CallFormat(FORMS["gpt-oss"], RUNNABLE)) == ("<|channel|>commentary", call)


def test_blanks_between_tags_do_not_matter_and_those_of_a_value_do():
    text = "<tool_call> <function=run>\n\n<parameter=code>  x\n\n</parameter></function></tool_call>"
    assert PARSERS[FORMS["qwen3-coder"]](text, RUNNABLE) == [ToolCall("run", {"code": "  x\n"})]


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("code", "null", "null"),
        ("note", "null", None),
        ("note", "42", "42"),
        ("mode", "1", "1"),
        ("number", "42", 42),
        ("number", "many", "many"),
        ("either", "42", 42),
        ("either", "4 2", "4 2"),
        ("unknown", "True", True),
        ("unknown", '{"a": 1}', {"a": 1}),
    ],
)
def test_a_value_in_tags_has_the_type_of_its_parameter(parameter, text, value):
    call = f"<tool_call><function=run><parameter={parameter}>{text}</parameter></function></tool_call>"
    assert PARSERS[FORMS["qwen3-coder"]](call, RUNNABLE) == [ToolCall("run", {parameter: value})]


def test_schemas_that_say_nothing_leave_types_open():
    odd = {"properties": {"a": True, "b": {"type": 3}, "c": {"anyOf": None}, "d": {"enum": []}}}
    assert signature_of("f", odd).types == dict.fromkeys("abcd", frozenset())
    assert signature_of("f", {"properties": None}) == ToolSignature("f")


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        (f"{EACH}<tool_call>\n{OBJECT}\n</tool_call>{END}", "hermes"),
        (f"{EACH}<tool_call>{{{{ c | tojson }}}}</tool_call>{END}", "hermes"),
        (OBJECT.replace("c.", "m.tool_calls[0].").replace("arguments", "parameters", 1), "json"),
        (f"{EACH}<{NAME}>{JSON}</{NAME}>{END}", "tagged"),
    ],
)
def test_a_format_that_has_a_name_goes_by_it(calls, name):
    assert parser_for("auto", template_of(calls)) == name


@pytest.mark.parametrize(
    "calls",
    [
        "<tool_call>",
        f"{EACH}{NAME} {PAIRS}{{{{ v }}}} {END}{END}",
        f"{EACH}do {JSON} with {NAME}{END}",
        f'{EACH}<call {PAIRS}{{{{ k }}}}="{{{{ v }}}}" {END}/>{END}',
        "{% for %}",
        "{{ raise_exception('no calls') }}",
    ],
)
def test_a_template_whose_calls_cannot_be_read_gets_its_tools_in_words(calls):
    template = template_of(calls)
    assert parser_for("auto", template) == "hermes"
    prompt = tools_for([SCHEMA], parser_for("auto", template), template)
    tokenizer = SimpleNamespace(chat_template=template)
    messages, options = with_tools(tokenizer, [{"role": "user", "content": "q"}], prompt)
    assert not options
    assert "<tool_call>" in messages[0]["content"]


@pytest.mark.parametrize(("parser", "in_words"), [("auto", False), ("json", True)])
def test_the_prompt_teaches_the_format_that_is_read(parser, in_words):
    template = template_of(CALLS["glm"])
    form = parser_for(parser, template)
    assert tools_for([SCHEMA], form, template).in_words == in_words
    assert shown(form) in described([SCHEMA], form)


def test_the_description_of_a_derived_format_is_a_call_in_it():
    for form in FORMS.values():
        [call] = PARSERS[form](shown(form), ())
        assert (call.name, call.arguments) == ("NAME", {"PARAMETER": "TEXT", "OTHER_PARAMETER": 1})


def test_a_server_shows_the_special_tokens_with_which_calls_are_written():
    marks = "".join(CallFormat(FORMS["gemma"], RUNNABLE).marks)
    assert all(mark in marks for mark in ("<|tool_call>", "<|q|>", "<tool_call|>"))


def test_arguments_come_as_text_where_the_template_wants_them_so():
    template = template_of(CALLS["deepseek"])
    assert json.dumps({"code": "42"}) in reply_with(template, ToolCall("run", {"code": "42"}))


def test_the_template_for_tools_decides():
    several = {"default": "no", "tool_use": template_of(CALLS["kimi"])}
    assert parser_for("auto", template_text(SimpleNamespace(chat_template=several))) == FORMS["kimi"]


# -- a reply divided into text and calls: the same however it arrives --------------------------------------------------


DIVIDED_TOOLS = (ToolSignature("add", "a"), ToolSignature("search", "query"), ToolSignature("now"))
TEMPLATES = [template_of(calls) for calls in CALLS.values()]
DERIVED = [parser_for("auto", template) for template in TEMPLATES]
FORMATS = st.builds(CallFormat, st.sampled_from([*sorted(PARSERS), *DERIVED]), st.just(DIVIDED_TOOLS), st.booleans())
WORDS = st.sampled_from(
    ["hello", " ", "\n", "<tool_call>", "</tool_call>", "<add>", "</add>", "<tool", '{"name": "add"}', "{", "<|python_"]
)
DRAWN_CALLS = st.builds(
    written,
    st.sampled_from([tool.name for tool in DIVIDED_TOOLS]),
    st.dictionaries(st.sampled_from("ab"), st.integers() | st.text("<a é>", max_size=4), max_size=2),
    st.sampled_from(sorted(PARSERS)),
)
OF_TEMPLATES = st.sampled_from([reply_with(t, ToolCall("add", {"a": 1}), ToolCall("now", {})) for t in TEMPLATES])
TEXT = st.lists(WORDS | DRAWN_CALLS | OF_TEMPLATES, max_size=8).map("".join)


@given(TEXT, FORMATS, st.lists(st.integers(0, 400), max_size=20))
def test_the_parts_do_not_depend_on_the_pieces(text, form, places):
    edges = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    parts = split_calls([text[a:b] for a, b in pairwise(edges)], form)
    assert parts == split_calls([text], form)
    if form.single:
        assert sum(isinstance(part, ToolCall) for part in parts) <= 1
    if not any(isinstance(part, ToolCall) for part in parts):
        assert "".join(parts) == text, "text without calls comes as it is"


@given(
    st.lists(
        st.tuples(
            st.text("word .", max_size=8),
            st.sampled_from(DIVIDED_TOOLS),
            st.dictionaries(st.just("a"), st.integers(), max_size=1),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(sorted(PARSERS)),
)
def test_calls_are_those_that_the_environments_find(said, parser):
    text = "".join((before if parser != "json" else "") + written(t.name, a, parser) for before, t, a in said)
    parts = split_calls([text], CallFormat(parser, DIVIDED_TOOLS))
    assert [p for p in parts if isinstance(p, ToolCall)] == PARSERS[parser](text, DIVIDED_TOOLS)
    if parser != "json":
        assert "".join("".join(p for p in parts if isinstance(p, str)).split()) == "".join(
            "".join(before.split()) for before, _, _ in said
        )


def test_text_before_and_after_calls_stays_in_order_without_blanks_between():
    call = written("add", {"a": 1}, "hermes")
    text = f"let me see {call}\n{call} and then"
    add = ToolCall("add", {"a": 1})
    assert split_calls([text], CallFormat("hermes", DIVIDED_TOOLS)) == ("let me see", add, add, "and then")
    assert split_calls([text], CallFormat("hermes", DIVIDED_TOOLS, single=True)) == ("let me see", add)


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
    assert split_calls([text], CallFormat(parser, DIVIDED_TOOLS)) == (text,)


def test_a_call_is_known_as_soon_as_it_is_complete_and_text_as_soon_as_it_can_be():
    splitter = CallSplitter(CallFormat("hermes", DIVIDED_TOOLS))
    call = json.dumps({"name": "now", "arguments": {}})
    pieces = ["Well, ", "<to", "be> ", "<tool_call>", call, "</tool_", "call>", "!"]
    assert [splitter.feed(piece) for piece in pieces] == [
        ("Well,",), (), (" <tobe>",), (), (), (), (ToolCall("now", {}),), ("!",),
    ]  # fmt: skip
    assert splitter.finish() == ()


@pytest.mark.parametrize(("parser", "said"), [("json", ""), ("hermes", ""), ("hermes", "Well")])
def test_blanks_without_end_take_linear_time(parser, said):
    blanks, form = " " * 200_000, CallFormat(parser, DIVIDED_TOOLS)
    began = time.monotonic()
    parts = split_calls([said, *blanks], form)
    assert time.monotonic() - began < 4
    assert parts == (said + blanks,)
