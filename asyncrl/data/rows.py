"""One dataset row, and how it is read from the schema that DAPO-Math-17k and verl's datasets share.

A record has `prompt` (list of {role, content}), `data_source`, `reward_model` ({ground_truth, style}) and, optionally,
`extra_info`; other columns are ignored. Pure: records come in as parsed JSON or Arrow values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.errors import DataError, explain

T = TypeVar("T")

SCHEMA = 'one object such as {"prompt": [{"role": "user", "content": "..."}], "data_source": "...", ' + (
    '"reward_model": {"ground_truth": "..."}}'
)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a prompt; `role` is whatever the chat template knows (system, user, assistant, tool)."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One task: what the policy is asked and what its reward is judged by.

    `extra` holds `extra_info` as (key, value) pairs, values that are no strings as JSON. `origin` says where the row
    stands: `file:line` counted from 1 for JSONL, `file:row N` counted from 0 for parquet and hub datasets.
    """

    messages: tuple[ChatMessage, ...]
    ground_truth: str
    data_source: str
    extra: tuple[tuple[str, str], ...]
    origin: str


def parse_json_line(line: str, origin: str) -> PromptRow:
    """The row that one line of a JSONL file holds. Raises DataError naming `origin`."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        found = f"not JSON: {error.msg} at column {error.colno}"
        raise DataError(explain(f"the row at {origin}", found, f"write {SCHEMA} a line")) from error
    return parse_record(record, origin)


def parse_record(record: object, origin: str) -> PromptRow:
    """The row of a parsed record. Raises DataError naming `origin`, the key, what was found and what to do."""
    if not isinstance(record, Mapping):
        raise _malformed(origin, f"{_kind(record)} instead of an object", f"write {SCHEMA}")
    reward_model = _field(record, "reward_model", Mapping, origin)
    if "ground_truth" not in reward_model:
        raise _malformed(origin, "reward_model has no ground_truth", "add reward_model.ground_truth, the right answer")
    return PromptRow(
        messages=_messages(_field(record, "prompt", Sequence, origin), origin),
        ground_truth=_ground_truth(reward_model["ground_truth"], origin),
        data_source=_field(record, "data_source", str, origin),
        extra=_extra(record.get("extra_info"), origin),
        origin=origin,
    )


def to_record(row: PromptRow) -> dict[str, object]:
    """The record of a row, for writers of dataset files; `parse_record` reads the same row back."""
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


def _ground_truth(value: object, origin: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        do = "write the right answer as a string or a number"
        raise _malformed(origin, f"reward_model.ground_truth is {_kind(value)}", do)
    text = str(value)
    if not text.strip():
        raise _malformed(origin, "reward_model.ground_truth is empty", "fill in the right answer or remove the row")
    return text


def _extra(value: object, origin: str) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise _malformed(origin, f"extra_info is {_kind(value)} instead of an object", "make it one or leave it out")
    return tuple(
        (str(key), item if isinstance(item, str) else json.dumps(item, default=str)) for key, item in value.items()
    )


def _field(record: Mapping[str, object], key: str, kind: type[T], origin: str, prefix: str = "") -> T:
    if key not in record:
        keys = ", ".join(sorted(str(k) for k in record)) or "none"
        raise _malformed(origin, f"no {prefix}{key}; its keys are {keys}", f"add {prefix}{key}: {SCHEMA}")
    value = record[key]
    # a string is a sequence too, and the commonest mistake is a prompt that is a bare string
    if not isinstance(value, kind) or (kind is Sequence and isinstance(value, str)):
        do = f"make {prefix}{key} {_KINDS[kind]}: {SCHEMA}"
        raise _malformed(origin, f"{prefix}{key} is {_kind(value)} instead of {_KINDS[kind]}", do)
    return value


_KINDS: dict[type, str] = {Mapping: "an object", Sequence: "a list", str: "a string"}


def _kind(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _malformed(origin: str, found: str, do: str) -> DataError:
    return DataError(explain(f"the row at {origin}", found, do))
