import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.rows import ChatMessage, PromptRow, RowReader, parse_record, to_record
from asyncrl.errors import DataError

RECORD = {
    "data_source": "math_dapo",
    "prompt": [{"content": "What is 6 * 7?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "a1", "level": 3, "tags": ["x"]},
}


@pytest.mark.parametrize(("value", "expected"), [(42, "42"), (0.5, "0.5"), ("\\frac{1}{2}", "\\frac{1}{2}")])
def test_numbers_are_accepted_as_ground_truth(value: object, expected: str) -> None:
    assert parse_record(RECORD | {"reward_model": {"ground_truth": value}}, "o").ground_truth == expected


text = st.text(min_size=1).filter(lambda t: t.strip() != "")


@settings(max_examples=50)
@given(
    messages=st.lists(st.builds(ChatMessage, text, text), min_size=1, max_size=3).map(tuple),
    truth=text,
    source=st.text(),
    extra=st.dictionaries(st.text(), st.text(), max_size=3).map(lambda d: tuple(d.items())),
)
def test_what_is_written_is_read_back(messages, truth, source, extra) -> None:
    row = PromptRow(messages, truth, source, extra, "f:1", ("\0prompt",))
    assert RowReader().line(json.dumps(to_record(row)), "f:1") == row


GSM8K = {"question": "What is 6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42", "pass_rate": 0.25}
PLAIN = {"prompt": "What is 6 * 7?", "answer": 42, "pass_rate": 0.25}


def without(key: str) -> dict:
    return {k: v for k, v in RECORD.items() if k != key}


BAD = {
    "a list": ([1], "list [1] instead of an object"),
    "no prompt": (without("prompt"), "no prompt; its keys are ability, data_source, extra_info, reward_model"),
    "no data source": (without("data_source"), "no data_source"),
    "no reward model": (without("reward_model"), "no reward_model"),
    "prompt is text": (RECORD | {"prompt": "What is 6 * 7?"}, "prompt is str 'What is 6 * 7?' instead of a list"),
    "prompt is empty": (RECORD | {"prompt": []}, "prompt is empty"),
    "message is text": (RECORD | {"prompt": ["hi"]}, "prompt[0] is str 'hi' instead of an object"),
    "no content": (RECORD | {"prompt": [{"role": "user"}]}, "no prompt[0].content"),
    "content is a number": (RECORD | {"prompt": [{"role": "user", "content": [1]}]}, "prompt[0].content[0] is int 1"),
    "content is blank, and an id": (RECORD | {"prompt": [{"role": "user", "content": "", "id": "1"}]}, "empty role"),
    "content is blank": (RECORD | {"prompt": [{"role": "user", "content": " "}]}, "empty role or content"),
    "no ground truth": (RECORD | {"reward_model": {"style": "rule"}}, "reward_model has no ground_truth"),
    "ground truth is no number": (RECORD | {"reward_model": {"ground_truth": math.nan}}, "float nan, no finite number"),
    "answer is infinite": ({"prompt": "?", "answer": -math.inf}, "answer is float -inf, no finite number"),
    "extra is a list": (RECORD | {"extra_info": []}, "extra_info is list [] instead of an object"),
    "no schema": ({"text": "x"}, "the keys text, which no schema has"),
    "no mark": (GSM8K | {"answer": "42"}, "answer has no ####"),
    "nothing behind the mark": (GSM8K | {"answer": "so ####  "}, "what follows #### is empty"),
    "question is blank": (GSM8K | {"question": " "}, "question is empty"),
    "answer is a number": (GSM8K | {"answer": 42}, "answer is int 42 instead of a string"),
    "prompt is a number": (PLAIN | {"prompt": 3}, "prompt is int 3"),
    "no question": (PLAIN, "no question", "gsm8k"),
    "no prompt, asked": (GSM8K, "no prompt", "prompt_answer"),
    "no reward model, asked": (GSM8K, "no reward_model", "verl"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_refused_by_name(case: str) -> None:
    record, found, *schema = BAD[case]
    with pytest.raises(DataError) as error:
        parse_record(record, "data/train.jsonl:12", *schema)
    message = str(error.value)
    assert message.startswith("asked: the row at data/train.jsonl:12\n")
    assert "data.schema=" in message or "these schemas" in message or case in ("a list", "extra is a list")
    assert found in message.splitlines()[1]
    assert len(message.splitlines()[2]) > len("do:    ")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"prompt": nope}', "not JSON: .* at column 12"),
        ('{"prompt": "a \\ud83d b", "answer": "1"}', r"half a character: '\\ud83d'"),
        ('{"prompt": "a", "answer": "\\uDC00"}', r"half a character: '\\udc00'"),
        ('{"prompt": "a", "answer": "1", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"prompt": "a", "answer": ' + "1" * 5000 + "}", "not to be read: .*digits"),
    ],
)
def test_json_that_nobody_can_use_names_the_line(line: str, found: str) -> None:
    with pytest.raises(DataError, match=rf"train\.jsonl:3\nfound: .*{found}"):
        RowReader().line(line, "train.jsonl:3")


def test_whole_characters_and_backslashes_are_read() -> None:
    row = RowReader().line('{"prompt": "\\ud83d\\ude00 \\\\ud83d", "answer": "1"}', "f:1")
    assert row.messages[0].content == "\U0001f600 \\ud83d"


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(DataError) as error:
        parse_record(RECORD | {"prompt": "x" * 10_000}, "o")
    assert len(str(error.value)) < 500


ASKED = {"role": "user", "content": "Oslo?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
SAID = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm", "name": None}


def read(messages, **more):
    return parse_record({"prompt": messages, "answer": "4", **more}, "f:1")


def test_every_field_of_a_message_is_kept() -> None:
    row = read([ASKED, SAID, {"role": "tool", "content": "", "tool_call_id": "a"}])
    assert row.conversation()[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
        "reasoning_content": "hm",
    }
    assert row.conversation()[2] == {"role": "tool", "content": "", "tool_call_id": "a"}
    flat = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1, "b": None}}]}  # null by Arrow
    assert read([ASKED, flat]).conversation()[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize(("truth", "text"), [(None, ""), (" ", ""), (True, "true"), ([], "[]"), (0, "0")])
def test_a_truth_may_be_anything_and_none(truth: object, text: str) -> None:
    row = parse_record(RECORD | {"reward_model": {"ground_truth": truth}}, "f:1")
    assert (row.ground_truth, row.truth()) == (text, truth if text else "")


def test_messages_that_only_call_or_think_and_an_empty_system_are_read() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])}
    thought = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    row = read([{"role": "system", "content": ""}, ASKED, called, {"role": "tool", "content": "sun"}, thought])
    assert row.conversation()[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert row.conversation()[4] == {"role": "assistant", "content": "", "reasoning_content": "hm"}


def test_conversations_have_a_system_column_and_calls_as_messages() -> None:
    turns = [
        {"from": "human", "value": "Oslo?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "sun"},
        {"from": "gpt", "value": "Sun."},
    ]
    row = parse_record({"conversations": turns, "system": "Be short."}, "f:1")
    assert [m.role for m in row.messages] == ["system", "user", "assistant", "tool"]
    assert row.conversation()[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    row = parse_record({"conversations": [{"from": "system", "value": "A"}, *turns], "system": "B"}, "f:1")
    assert [m.content for m in row.messages][:2] == ["A", "Oslo?"]
    assert row.extra == (("system", "B"),), "rewards read it still"
    thinks = {"from": "tool_call", "value": '<think>hm</think>\n[{"name": "weather", "arguments": {"city": "Oslo"}}]'}
    row = parse_record({"conversations": [turns[0], thinks, *turns[2:]]}, "f:1")
    assert row.conversation()[1]["reasoning_content"] == "hm"
    assert row.conversation()[1]["tool_calls"][0]["function"]["name"] == "weather"


def test_a_conversation_that_ends_in_a_call_has_it_as_its_truth() -> None:
    reader = RowReader()
    called = [{"name": "weather", "arguments": {"city": "Oslo"}}]
    for last in (SAID, {"from": "function_call", "value": json.dumps(called[0])}):
        row = reader.record({"messages": [ASKED, last]}, "f:1")
        assert (row.truth(), len(row.messages)) == (called, 1)
    assert reader.unused == {"reasoning_content of the last reply"}


def test_a_null_of_arrow_is_left_out_and_one_in_json_is_meant() -> None:
    columns = {"city": {"type": "string", "enum": None}, "n": None}
    tool = {"name": "weather", "parameters": {"properties": columns}}
    (schema,) = parse_record({"prompt": "?", "tools": [tool]}, "f:1").tools()
    assert schema["function"]["parameters"] == {"properties": {"city": {"type": "string"}}}
    call = {"name": "f", "arguments": '{"a": null}'}
    assert read([ASKED, {"role": "assistant", "tool_calls": [call]}]).conversation()[1]["tool_calls"][0][
        "function"
    ] == {
        "name": "f",
        "arguments": {"a": None},
    }


@pytest.mark.parametrize("none", ["", "null", "[]", []])
def test_no_calls_in_any_form_are_none(none: object) -> None:
    assert read([{**ASKED, "tool_calls": none}]).messages == (ChatMessage("user", "Oslo?"),)


def test_a_prompt_with_a_question_and_an_answer_is_asked_as_a_prompt() -> None:
    row = parse_record({"prompt": "Solve: 1+1?", "question": "1+1?", "answer": "2"}, "f:1")
    assert (row.messages[0].content, row.ground_truth, row.extra) == ("Solve: 1+1?", "2", (("question", "1+1?"),))


def test_a_content_in_parts_is_its_text() -> None:
    parts = [{"type": "text", "text": "Os"}, {"text": "lo"}, "?"]
    assert read([{"role": "user", "content": parts}]).messages == (ChatMessage("user", "Oslo?"),)


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (RECORD | {"images": ["a.png"]}, "images, and data.image_directory is not set"),
        ({"prompt": "<video> what?", "answer": "1", "video": {"bytes": "x"}}, "video, and only text"),
        ({"prompt": [{"role": "user", "content": [{"type": "video_url"}]}], "answer": "1"}, r"content\[0\] is dict"),
        ({"conversations": [{"from": "human", "value": [{"type": "audio"}]}], "answer": "1"}, r"value\[0\] is dict"),
        ({"prompt": [ASKED, {"role": "assistant", "tool_calls": ["weather()"]}], "answer": "1"}, "tool_calls has str"),
        ({"conversations": [{"from": "chatgpt", "value": "hi"}]}, "nothing before its reply"),
        ({"conversations": [{"from": "oracle", "value": "hi"}]}, "from is str 'oracle'"),
        ({"prompt": "?", "extra_info": {"level": 1}, "level": 2}, "level as a column and in extra_info"),
    ],
)
def test_what_cannot_be_trained_or_read_is_refused(record, found) -> None:
    with pytest.raises(DataError, match=rf"f:1\nfound: .*{found}"):
        parse_record(record, "f:1")


def test_conversations_are_prompts_whose_last_reply_is_the_truth() -> None:
    turns = [
        {"from": "system", "value": "Be short."},
        {"from": "human", "value": "2+2?"},
        {"from": "gpt", "value": "4"},
    ]
    row = parse_record({"conversations": turns, "id": "a"}, "f:1")
    assert [(m.role, m.content) for m in row.messages] == [("system", "Be short."), ("user", "2+2?")]
    assert (row.ground_truth, row.extra) == ("4", (("id", "a"),))
    asked = {"messages": [ASKED, SAID | {"content": "I look."}, ASKED], "answer": 7}
    assert (parse_record(asked, "f:1").truth(), len(parse_record(asked, "f:1").messages)) == (7, 3)


def test_values_come_to_rewards_as_they_are_in_the_dataset() -> None:
    truth = {"target": ["a", "b"]}
    row = parse_record(RECORD | {"reward_model": {"ground_truth": truth}, "extra_info": {"n": 5, "s": "5"}}, "f:1")
    assert (row.truth(), row.values()) == (truth, {"n": 5, "s": "5"})
    named = parse_record({"prompt": "?", "answer": "Paris", "ground_truth": 3, "extra_info": {"prompt": "q"}}, "f:1")
    assert (named.truth(), named.values(), named.is_chat) == ("Paris", {"prompt": "q", "ground_truth": 3}, False)
    assert parse_record({"prompt": "?", "answer": "[1]"}, "f:1").truth() == "[1]"
    assert parse_record({"prompt": "?", "solution": "4"}, "f:1").ground_truth == ""


def test_columns_that_nothing_uses_are_named() -> None:
    reader = RowReader()
    reader.record(RECORD | {"agent_name": "a"}, "f:1")
    assert reader.unused == {"ability", "agent_name"}
    kept = [*(k for k in RECORD if k != "ability"), "images", "tools"]
    assert RowReader().needed([*RECORD, "images", "tools", "other"]) == kept
