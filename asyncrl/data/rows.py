"""A dataset row, and its readers for the schemas of `data.schema`; docs/data.md has examples.

verl (DAPO-Math-17k too): `prompt` (list of {role, content}), `data_source`, `reward_model` ({ground_truth, style}) and,
optionally, `extra_info`; other columns are ignored. gsm8k: `question`, and `answer`, whose text after the last `####`
counts. prompt_answer: `prompt` (a text or a list of messages) and `answer`. The last two put all other columns into
`extra`. Pure: records are parsed JSON or Arrow values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from asyncrl.errors import DataError, explain

T = TypeVar("T")

Schema = Literal["auto", "verl", "gsm8k", "prompt_answer"]

SCHEMA = 'one object such as {"prompt": [{"role": "user", "content": "..."}], "data_source": "...", ' + (
    '"reward_model": {"ground_truth": "..."}}'
)
_EXAMPLES: dict[str, str] = {
    "verl": SCHEMA,
    "gsm8k": 'one object such as {"question": "...", "answer": "... #### 42"}',
    "prompt_answer": 'one object such as {"prompt": "...", "answer": "..."}',
}
_VERL_COLUMNS = ("prompt", "data_source", "reward_model", "extra_info")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a prompt; `role` is any role of the chat template (system, user, assistant, tool)."""

    role: str
    content: str

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatMessage, (self.role, self.content)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One task: the messages for the policy, and the ground truth for the reward.

    `extra` holds `extra_info` as (key, value) pairs; values other than strings are JSON. `origin` locates the row:
    `file:line` counted from 1 for JSONL, `file:row N` counted from 0 for parquet and hub datasets.
    """

    messages: tuple[ChatMessage, ...]
    ground_truth: str
    data_source: str
    extra: tuple[tuple[str, str], ...]
    origin: str

    def __reduce__(self) -> tuple[Any, ...]:
        return PromptRow, (self.messages, self.ground_truth, self.data_source, self.extra, self.origin)


def schema_of(keys: Iterable[object]) -> Schema:
    """The schema of records with these columns; "auto" if none fits."""
    found = set(keys)
    if "reward_model" in found or "data_source" in found:
        return "verl"
    if {"question", "answer"} <= found:
        return "gsm8k"
    return "prompt_answer" if {"prompt", "answer"} <= found else "auto"


def columns_of(names: Sequence[str], schema: Schema) -> list[str]:
    """The columns of a file that the schema needs."""
    is_verl = (schema_of(names) if schema == "auto" else schema) == "verl"
    return [name for name in names if not is_verl or name in _VERL_COLUMNS]


def parse_json_line(line: str, origin: str, schema: Schema = "auto") -> PromptRow:
    """The row of one line of a JSONL file. Raises DataError naming `origin`."""
    try:
        record = json.loads(line)
        if "\\ud" in line.lower():  # only an escape can write an unpaired surrogate
            json.dumps(record, ensure_ascii=False).encode()
        return parse_record(record, origin, schema)
    except DataError:
        raise
    except json.JSONDecodeError as error:
        found, cause = f"not JSON: {error.msg} at column {error.colno}", error
    except UnicodeEncodeError as error:
        found, cause = f"half a character: {error.object[error.start : error.end]!a}", error
    except ValueError as error:
        found, cause = f"not to be read: {error}", error
    except RecursionError as error:
        found, cause = "lists or objects nested too deeply", error
    do = f"write {_EXAMPLES.get(schema, SCHEMA)} a line"
    raise DataError(explain(f"the row at {origin}", found, do)) from cause


def parse_record(record: object, origin: str, schema: Schema = "auto") -> PromptRow:
    """The row of a parsed record. Raises DataError naming `origin`, the key, what was found and what to do."""
    if not isinstance(record, Mapping):
        do = f"write {_EXAMPLES.get(schema, SCHEMA)}"
        raise _malformed(origin, f"{_kind(record)} instead of an object", do)
    tried = schema_of(record) if schema == "auto" else schema
    if tried == "auto":
        keys = ", ".join(sorted(map(str, record))) or "none"
        do = "name them as one of these schemas: " + "; ".join(f"{n}: {e}" for n, e in _EXAMPLES.items())
        raise _malformed(origin, f"the keys {keys}, which no schema has", do)
    try:
        return _READERS[tried](record, origin)
    except DataError as error:
        raise DataError(f"{error} (read as data.schema={tried})") from None


def _read_verl(record: Mapping[str, object], origin: str) -> PromptRow:
    reward_model = _field(record, "reward_model", Mapping, origin)
    if "ground_truth" not in reward_model:
        raise _malformed(origin, "reward_model has no ground_truth", "add reward_model.ground_truth, the right answer")
    return PromptRow(
        messages=_messages(_field(record, "prompt", Sequence, origin), origin),
        ground_truth=_ground_truth(reward_model["ground_truth"], "reward_model.ground_truth", origin),
        data_source=_field(record, "data_source", str, origin),
        extra=_extra(record.get("extra_info"), origin),
        origin=origin,
    )


def _read_gsm8k(record: Mapping[str, object], origin: str) -> PromptRow:
    question = _field(record, "question", str, origin, schema="gsm8k")
    answer = _field(record, "answer", str, origin, schema="gsm8k")
    _, mark, truth = answer.rpartition("####")
    if not mark:
        do = "end it with #### and the right answer, or set data.schema=prompt_answer"
        raise _malformed(origin, f"answer has no ####: {_kind(answer)}", do)
    if not question.strip():
        raise _malformed(origin, "question is empty", "fill it in or remove the row")
    return PromptRow(
        messages=(ChatMessage("user", question),),
        ground_truth=_ground_truth(truth.strip(), "what follows ####", origin),
        data_source="gsm8k",
        extra=_others(record, ("question", "answer"), origin),
        origin=origin,
    )


def _read_prompt_answer(record: Mapping[str, object], origin: str) -> PromptRow:
    for key in ("prompt", "answer"):
        if key not in record:
            _field(record, key, str, origin, schema="prompt_answer")
    prompt = record["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence):
        do = "make it a text, or a list of {role, content} messages"
        raise _malformed(origin, f"prompt is {_kind(prompt)}", do)
    return PromptRow(
        messages=_messages(prompt, origin),
        ground_truth=_ground_truth(record["answer"], "answer", origin),
        data_source=str(record.get("data_source") or "prompt_answer"),
        extra=_others(record, ("prompt", "answer", "data_source"), origin),
        origin=origin,
    )


_READERS: dict[str, Callable[[Mapping[str, object], str], PromptRow]] = {
    "verl": _read_verl,
    "gsm8k": _read_gsm8k,
    "prompt_answer": _read_prompt_answer,
}


def with_system_prompt(row: PromptRow, text: str) -> PromptRow:
    """The row with a system message prepended; unchanged if it has one."""
    if any(message.role == "system" for message in row.messages):
        return row
    return replace(row, messages=(ChatMessage("system", text), *row.messages))


def to_record(row: PromptRow) -> dict[str, object]:
    """The record of a row, for dataset files; the inverse of `parse_record`."""
    return {
        "data_source": row.data_source,
        "prompt": [{"role": m.role, "content": m.content} for m in row.messages],
        "ability": "MATH",
        "reward_model": {"ground_truth": row.ground_truth, "style": "rule"},
        "extra_info": dict(row.extra),
    }


def _messages(prompt: Sequence[object], origin: str) -> tuple[ChatMessage, ...]:
    if len(prompt) == 0:
        raise _malformed(origin, "prompt is empty", "give it at least one {role, content} message")
    messages = []
    for number, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            do = 'write each message as {"role": "user", "content": "..."}'
            raise _malformed(origin, f"prompt[{number}] is {_kind(message)} instead of an object", do)
        role = _field(message, "role", str, origin, f"prompt[{number}].")
        content = _field(message, "content", str, origin, f"prompt[{number}].")
        if not role or not content.strip():
            raise _malformed(origin, f"prompt[{number}] has an empty role or content", "fill it in or remove the row")
        messages.append(ChatMessage(role, content))
    return tuple(messages)


def _ground_truth(value: object, key: str, origin: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        do = "write the right answer as a string or a number"
        raise _malformed(origin, f"{key} is {_kind(value)}", do)
    if isinstance(value, float) and not math.isfinite(value):
        do = "fill in the right answer or remove the row; an answer that is infinite or none is a string"
        raise _malformed(origin, f"{key} is {_kind(value)}, no finite number", do)
    text = str(value)
    if not text.strip():
        raise _malformed(origin, f"{key} is empty", "fill in the right answer or remove the row")
    return text


def _extra(value: object, origin: str) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise _malformed(origin, f"extra_info is {_kind(value)} instead of an object", "make it one or leave it out")
    return tuple(
        (str(key), item if isinstance(item, str) else json.dumps(item, default=str)) for key, item in value.items()
    )


def _others(record: Mapping[str, object], known: Sequence[str], origin: str) -> tuple[tuple[str, str], ...]:
    """`extra_info` and every other column that is not empty."""
    others = {key: value for key, value in record.items() if key not in (*known, "extra_info") and value is not None}
    return (*_extra(record.get("extra_info"), origin), *_extra(others, origin))


def _field(
    record: Mapping[str, object], key: str, kind: type[T], origin: str, prefix: str = "", schema: str = "verl"
) -> T:
    if key not in record:
        keys = ", ".join(sorted(str(k) for k in record)) or "none"
        raise _malformed(origin, f"no {prefix}{key}; its keys are {keys}", f"add {prefix}{key}: {_EXAMPLES[schema]}")
    value = record[key]
    # A string is a sequence too, and a bare string as prompt is the most common mistake.
    if not isinstance(value, kind) or (kind is Sequence and isinstance(value, str)):
        do = f"make {prefix}{key} {_KINDS[kind]}: {_EXAMPLES[schema]}"
        raise _malformed(origin, f"{prefix}{key} is {_kind(value)} instead of {_KINDS[kind]}", do)
    return value


_KINDS: dict[type, str] = {Mapping: "an object", Sequence: "a list", str: "a string"}


def _kind(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _malformed(origin: str, found: str, do: str) -> DataError:
    return DataError(explain(f"the row at {origin}", found, do))
