"""A dataset row, the marks of thoughts in its responses, and readers for the schemas of `data.schema`; docs/data.md has
examples.

verl (DAPO-Math-17k too): `prompt` (messages), `data_source`, `reward_model` ({ground_truth}), optionally `extra_info`;
other columns are not used, and named in the plan. The other schemas put all other columns into `extra`, which rewards
read. gsm8k: `question`, and `answer`, whose text after the last `####` is the ground truth. prompt_answer: `prompt` (a
text or messages), optionally `answer`. conversations: `conversations` or `messages`; the ground truth is `answer`, or
the last reply, or its calls; a last reply is no part of the prompt; `system` comes first. A message has role and
content, or from and value. Pure: records are parsed JSON or Arrow values.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import re
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from asyncrl.errors import DataError, explain, writing

if TYPE_CHECKING:
    from asyncrl.types.images import ImageStore

T = TypeVar("T")

Schema = Literal["auto", "verl", "gsm8k", "prompt_answer", "conversations", "nemo_gym"]

SCHEMA = 'one object such as {"prompt": [{"role": "user", "content": "..."}], "data_source": "...", ' + (
    '"reward_model": {"ground_truth": "..."}}'
)
_EXAMPLES: dict[str, str] = {
    "verl": SCHEMA,
    "gsm8k": 'one object such as {"question": "...", "answer": "... #### 42"}',
    "prompt_answer": 'one object such as {"prompt": "...", "answer": "..."}',
    "conversations": 'one object such as {"conversations": [{"from": "human", "value": "..."}, ...], "answer": "..."}',
    "nemo_gym": 'one object such as {"responses_create_params": {"input": [...]}, "agent_ref": {"name": "..."}}',
}
_COLUMNS: dict[str, tuple[str, ...]] = {
    "verl": ("prompt", "data_source", "reward_model", "extra_info"),
    "gsm8k": ("question", "answer"),
    "prompt_answer": ("prompt", "answer", "data_source"),
    "conversations": ("conversations", "messages", "answer", "data_source"),
    "nemo_gym": (),
}
_IMAGES, _MEDIA = ("images", "image"), ("video", "videos", "audio", "audios")
_NO_MEDIA = "train a text model on text alone: remove these rows, or the videos and audio of all rows"
_MARK, _OF_VERL = f"\0{secrets.token_hex(8)}\ufffc", "<image>"
"""Where a content has an image: the first until it is stored, which no text can forge; the second in verl's rows."""
IMAGE = re.compile("\ufffc([0-9a-f]{28})")
"""An image in the content of a message, by its key in `data.image_directory`."""
SENT_IMAGE = re.compile(f"{_MARK}([^\0]+)\0")
"""An image that is not stored yet, by its source as JSON. Only in this process."""
_CALLERS = ("function_call", "tool_call")
"""In `from`: the message is a call, as JSON, perhaps behind a thought."""
_SPEAKERS = dict.fromkeys(("human", "user"), "user") | {"system": "system", "developer": "developer"}
_SPEAKERS |= dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot", "bard", "bing", *_CALLERS), "assistant")
_SPEAKERS |= dict.fromkeys(("observation", "function_response", "tool"), "tool")
"""Name in `from` -> role."""
_CHAT, _TRUTH = "\0prompt", "\0ground_truth"
"""In `PromptRow.structured`, with a character that no column has."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a prompt. `role`: any of the chat template (system, user, assistant, tool). `content`: text, with
    images as `IMAGE` finds them. `more`: the other fields, such as tool_calls and reasoning_content, as a JSON object;
    empty for none."""

    role: str
    content: str
    more: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatMessage, (self.role, self.content, self.more)

    def fields(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        return {"role": self.role, "content": self.content} | (json.loads(self.more) if self.more else {})


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One task: the messages for the policy, and the ground truth for the reward.

    `extra` holds `extra_info` and other columns as (key, value) pairs; values other than strings are JSON, and
    `structured` has their keys, `_TRUTH` too if the ground truth is JSON, and `_CHAT` if the dataset has messages.
    `origin` locates the row: `file:line` counted from 1 for JSONL, `file:row N` counted from 0 for parquet and hub
    datasets. `thinks`, for rewards: the prompt ends inside a thought of the policy.
    """

    messages: tuple[ChatMessage, ...]
    ground_truth: str
    data_source: str
    extra: tuple[tuple[str, str], ...]
    origin: str
    structured: tuple[str, ...] = ()
    thinks: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        told = self.data_source, self.extra, self.origin, self.structured, self.thinks
        return PromptRow, (self.messages, self.ground_truth, *told)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them."""
        return [message.fields() for message in self.messages]

    def truth(self) -> Any:
        """The ground truth as it is in the dataset: a text, number, list or object."""
        return json.loads(self.ground_truth) if _TRUTH in self.structured else self.ground_truth

    def tools(self) -> list[Mapping[str, Any]]:
        """The schemas of the row's own tools, in OpenAI's form, from its column (or key of `extra_info`) `tools`; empty
        for none, and for a column of another meaning. Raises DataError: a tool has no name."""
        text = dict(self.extra).get("tools") or "[]"
        try:
            found = json.loads(text)
            found = found if isinstance(found, list) else [found]
            tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in found]
        except ValueError:
            return []
        found = [tool for tool in tools if isinstance(tool, Mapping)]
        made: list[Mapping[str, Any]] = [t if "function" in t else {"type": "function", "function": t} for t in found]
        for schema in made:
            if not isinstance(schema["function"], Mapping) or not isinstance(schema["function"].get("name"), str):
                do = 'write {"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise _malformed(self.origin, f"tools has {_kind(schema)}", do)
        return made

    @property
    def is_chat(self) -> bool:
        """Whether the dataset has messages, not a text."""
        return _CHAT in self.structured

    def values(self) -> dict[str, Any]:
        """`extra` with the values that the dataset has."""
        return {key: json.loads(value) if key in self.structured else value for key, value in self.extra}


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its thoughts. `begun`: the chat template ends prompts with the opening mark."""

    opening: str = "<think>"
    closing: str = "</think>"
    begun: bool = False

    def is_open(self, text: str) -> bool:
        """Whether the text ends inside a thought."""
        return text.rfind(self.opening) > text.rfind(self.closing)

    def after(self, response: str, *, begun: bool) -> str:
        """The text after the last thought; empty if that has no end. `begun`: the prompt ends inside a thought."""
        is_unfinished = self.is_open(response) or (begun and self.closing not in response)
        return "" if is_unfinished else response.rpartition(self.closing)[2]


def schema_of(keys: Iterable[object]) -> Schema:
    """The schema of records with these columns; "auto" if none fits."""
    found = set(keys)
    if "responses_create_params" in found:
        return "nemo_gym"
    if "reward_model" in found or ("data_source" in found and "answer" not in found):
        return "verl"
    if {"question", "answer"} <= found and "prompt" not in found:
        return "gsm8k"
    if "prompt" in found:
        return "prompt_answer"
    return "conversations" if found & {"conversations", "messages"} else "auto"


class RowReader:
    """Reads the rows of a dataset and stores their images. `unused` gets the names of columns that no row uses."""

    def __init__(
        self, schema: Schema = "auto", unused: set[str] | None = None, image_directory: str | None = None
    ) -> None:
        self.unused: set[str] = set() if unused is None else unused
        self._schema = schema
        self._store: ImageStore | None = None
        if image_directory is not None:
            from asyncrl.types.images import ImageStore  # processes of rewards read rows, and import no numpy

            self._store = ImageStore(image_directory)

    def needed(self, names: Sequence[str]) -> list[str]:
        """The columns of a file to read."""
        if (schema_of(names) if self._schema == "auto" else self._schema) != "verl":
            return list(names)
        wanted = *_COLUMNS["verl"], *_IMAGES, *_MEDIA, "tools"
        self.unused |= {name for name in names if name not in wanted}
        return [name for name in names if name in wanted]

    def line(self, line: str, origin: str) -> PromptRow:
        """The row of one line of a JSONL file. Raises DataError naming `origin`."""
        try:
            record = json.loads(line)
            if "\\ud" in line.lower():  # only an escape can write an unpaired surrogate
                json.dumps(record, ensure_ascii=False).encode()
            return self.record(record, origin)
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
        do = f"write {_EXAMPLES.get(self._schema, SCHEMA)} a line"
        raise DataError(explain(f"the row at {origin}", found, do)) from cause

    def record(self, record: object, origin: str) -> PromptRow:
        """The row of a parsed record. Raises DataError naming `origin`, the key, what was found and what to do."""
        if not isinstance(record, Mapping):
            do = f"write {_EXAMPLES.get(self._schema, SCHEMA)}"
            raise _malformed(origin, f"{_kind(record)} instead of an object", do)
        schema = schema_of(record) if self._schema == "auto" else self._schema
        if schema == "auto":
            keys = ", ".join(sorted(map(str, record))) or "none"
            do = "name them as one of these schemas: " + "; ".join(f"{n}: {e}" for n, e in _EXAMPLES.items())
            raise _malformed(origin, f"the keys {keys}, which no schema has", do)
        for key in _MEDIA:
            if record.get(key) not in (None, "", [], {}):
                raise _malformed(origin, f"{key}, and only text can be trained", _NO_MEDIA)
        try:
            messages, truth, source = _READERS[schema](record, origin)
        except DataError as error:
            raise DataError(f"{error} (read as data.schema={schema})") from None
        messages = self._with_images(messages, record, origin)
        used = *_COLUMNS[schema], *_IMAGES, "extra_info"
        others = {k: v for k, v in record.items() if k not in used and v is not None}
        if schema == "verl":
            self.unused |= others.keys() - {"tools"}
            others = {name: value for name, value in others.items() if name == "tools"}
        if schema == "conversations" and record.get("answer") is None:
            last = list(record.get("conversations") or record["messages"])[-1]
            ignored = last.keys() - {"role", "content", "from", "value", "tool_calls"}
            self.unused |= {f"{name} of the last reply" for name in ignored if last[name] is not None}
        text, is_json = truth
        extra, structured = _extra(record.get("extra_info"), others, origin)
        is_chat = schema != "gsm8k" and not isinstance(record.get("prompt"), str)
        structured = (*[_CHAT] * is_chat, *[_TRUTH] * is_json, *structured)
        return PromptRow(messages, text, source, extra, origin, structured)

    def _with_images(
        self, messages: tuple[ChatMessage, ...], record: Mapping[str, Any], origin: str
    ) -> tuple[ChatMessage, ...]:
        """The messages with the keys of their images, which are stored: those that parts of contents bring, and those
        of the row's column, in order, for the other places. Raises DataError."""
        column: Any = next((record[name] for name in _IMAGES if record.get(name) not in (None, "", [])), [])
        given = deque(column if isinstance(column, list | tuple) else [column])
        texts = [message.content for message in messages]
        if given and _MARK not in "".join(texts):
            texts = [text.replace(_OF_VERL, _MARK) for text in texts]
            if _MARK not in "".join(texts):  # before the question
                first = next((i for i, message in enumerate(messages) if message.role == "user"), 0)
                texts[first] = _MARK * len(given) + texts[first]
        if not given and _MARK not in "".join(texts):
            return messages
        if self._store is None:
            do = "set data.image_directory, where a run keeps the images of its prompts, or remove these rows"
            raise _malformed(origin, "images, and data.image_directory is not set", do)
        from asyncrl.data.images import image_bytes

        made = []
        for text in texts:
            first, *rest = text.split(_MARK)
            for part in rest:
                own, closed, after = part.partition("\0")
                if not closed and not given:
                    raise _malformed(origin, "more places for images than images", "give each place one")
                source = json.loads(own) if closed else given.popleft()
                data = image_bytes(source, origin)
                with writing(self._store.directory):
                    key = self._store.put(data)
                first += "\ufffc" + key + (after if closed else part)
            made.append(first)
        if given:
            raise _malformed(origin, f"{len(given)} images without a place in the messages", f"write {_OF_VERL} there")
        return tuple(replace(m, content=text) for m, text in zip(messages, made, strict=True))


def parse_record(record: object, origin: str, schema: Schema = "auto") -> PromptRow:
    """As `RowReader.record`."""
    return RowReader(schema).record(record, origin)


_Truth = tuple[str, bool]
"""The text of a ground truth, and whether it is the JSON of a list or an object."""
_Read = tuple[tuple[ChatMessage, ...], _Truth, str]
"""Messages, ground truth and data source."""


def _read_verl(record: Mapping[str, object], origin: str) -> _Read:
    reward_model = _field(record, "reward_model", Mapping, origin)
    if "ground_truth" not in reward_model:
        raise _malformed(origin, "reward_model has no ground_truth", "add reward_model.ground_truth, the right answer")
    messages = _messages(_field(record, "prompt", Sequence, origin), origin)
    truth = _ground_truth(reward_model["ground_truth"], "reward_model.ground_truth", origin)
    return messages, truth, _field(record, "data_source", str, origin)


def _read_gsm8k(record: Mapping[str, object], origin: str) -> _Read:
    question = _field(record, "question", str, origin, schema="gsm8k")
    answer = _field(record, "answer", str, origin, schema="gsm8k")
    _, mark, truth = answer.rpartition("####")
    if not mark:
        do = "end it with #### and the right answer, or set data.schema=prompt_answer"
        raise _malformed(origin, f"answer has no ####: {_kind(answer)}", do)
    for name, text in (("question", question), ("what follows ####", truth)):
        if not text.strip():
            raise _malformed(origin, f"{name} is empty", "fill it in or remove the row")
    return (ChatMessage("user", question),), _ground_truth(truth.strip(), "what follows ####", origin), "gsm8k"


def _read_prompt_answer(record: Mapping[str, object], origin: str) -> _Read:
    if "prompt" not in record:
        _field(record, "prompt", str, origin, schema="prompt_answer")
    prompt = record["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence):
        do = "make it a text, or a list of {role, content} messages"
        raise _malformed(origin, f"prompt is {_kind(prompt)}", do)
    messages, truth = _messages(prompt, origin), _ground_truth(record.get("answer"), "answer", origin)
    return messages, truth, str(record.get("data_source") or "prompt_answer")


def _read_conversations(record: Mapping[str, object], origin: str) -> _Read:
    key = "conversations" if "conversations" in record else "messages"
    messages = _messages(_field(record, key, Sequence, origin, schema="conversations"), origin, key)
    source = str(record.get("data_source") or "conversations")
    replies = messages[-1:] if messages[-1].role == "assistant" else ()
    if record.get("answer") is not None:
        truth = _ground_truth(record["answer"], "answer", origin)
    else:
        truth = (replies[0].content, False) if replies else ("", False)
        if replies and (calls := replies[0].fields().get("tool_calls")):
            truth = json.dumps([call["function"] for call in calls], ensure_ascii=False), True
    rest = messages[: len(messages) - len(replies)]
    if record.get("system") and rest and rest[0].role != "system":
        rest = (ChatMessage("system", _field(record, "system", str, origin)), *rest)
    if not rest:
        raise _malformed(origin, f"{key} has nothing before its reply", "begin it with a message of the user")
    return rest, truth, source


def _read_nemo_gym(record: Mapping[str, object], origin: str) -> _Read:
    params = _field(record, "responses_create_params", Mapping, origin, schema="nemo_gym")
    asked = params.get("input")
    if not isinstance(asked, str):  # calls and results of earlier turns are the agent's matter
        items = asked if isinstance(asked, Sequence) else ()
        asked = [item for item in items if isinstance(item, Mapping) and item.get("role")]
    return _read_prompt_answer({"prompt": asked, "data_source": "nemo_gym"}, origin)


_READERS = {
    "verl": _read_verl,
    "gsm8k": _read_gsm8k,
    "prompt_answer": _read_prompt_answer,
    "conversations": _read_conversations,
    "nemo_gym": _read_nemo_gym,
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
        "prompt": row.conversation(),
        "reward_model": {"ground_truth": row.truth(), "style": "rule"},
        "extra_info": row.values(),
    }


def _messages(prompt: Sequence[object], origin: str, key: str = "prompt") -> tuple[ChatMessage, ...]:
    if len(prompt) == 0:
        raise _malformed(origin, f"{key} is empty", "give it at least one {role, content} message")
    return tuple(_message(message, f"{key}[{number}]", origin) for number, message in enumerate(prompt))


def _message(message: object, at: str, origin: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        do = 'write each message as {"role": "user", "content": "..."}'
        raise _malformed(origin, f"{at} is {_kind(message)} instead of an object", do)
    # Arrow fills fields that other messages have with null: there is no difference between null and left out.
    fields = {name: value for name, value in message.items() if value is not None}
    names = ("role", "content") if "role" in fields or "from" not in fields else ("from", "value")
    role = _field(fields, names[0], str, origin, f"{at}.")
    if names[0] == "from":
        if role not in _SPEAKERS:
            raise _malformed(origin, f"{at}.from is {_kind(role)}", f"name one of {', '.join(_SPEAKERS)}")
        if role in _CALLERS:
            thought, mark, calls = str(fields.get("value")).rpartition("</think>")
            fields |= {"value": None, "tool_calls": calls} | (
                {"reasoning_content": thought.rpartition("<think>")[2].strip()} if mark else {}
            )
        role = _SPEAKERS[role]
    more = {name: value for name, value in fields.items() if name not in names}
    if calls := _calls(more.pop("tool_calls", None) or [], f"{at}.tool_calls", origin):
        more["tool_calls"] = calls
    if role == "assistant" and more:  # it called, or only thought
        fields[names[1]] = fields.get(names[1]) or ""
    if isinstance(fields.get(names[1]), list):
        fields[names[1]] = _joined(fields[names[1]], f"{at}.{names[1]}", origin)
    content = _field(fields, names[1], str, origin, f"{at}.")
    if not role or not (content.strip() or role in ("system", "developer", "tool") or (role == "assistant" and more)):
        raise _malformed(origin, f"{at} has an empty role or content", "fill it in or remove the row")
    return ChatMessage(role, content, json.dumps(more, ensure_ascii=False, default=str) if more else "")


def _joined(parts: Sequence[object], key: str, origin: str) -> str:
    """The text of a content that comes in parts."""
    texts = []
    for number, part in enumerate(parts):
        kind = str(part.get("type") or "text") if isinstance(part, Mapping) else ""
        kind = kind.removeprefix("input_").removeprefix("output_")
        text: Any = part
        if isinstance(part, Mapping) and kind == "text":
            text = part.get("text")
        elif isinstance(part, Mapping) and kind.startswith("image"):  # image_url is OpenAI's
            own = next((part[name] for name in (kind, "image_url", "url", "path", "image") if part.get(name)), None)
            text = sent_image(own) if own else _MARK
        if not isinstance(text, str):
            raise _malformed(origin, f"{key}[{number}] is {_kind(part)}, and only text can be trained", _NO_MEDIA)
        texts.append(text)
    return "".join(texts)


def sent_image(source: object) -> str:
    """An image in the content of a message, as `SENT_IMAGE` finds it. `source`: as `images.image_bytes` takes it."""
    return f"{_MARK}{json.dumps(source, default=_coded)}\0"


def _coded(value: Any) -> str:
    """An image that JSON does not hold."""
    if hasattr(value, "save") and hasattr(value, "convert"):  # of PIL
        value.convert("RGB").save(file := io.BytesIO(), "png")
        value = file.getvalue()
    return "data:image/any;base64," + base64.b64encode(value).decode() if isinstance(value, bytes) else repr(value)


def without_marks(text: str) -> str:
    """The text without what would be read as an image."""
    return IMAGE.sub(r" \1", text) if "\ufffc" in text else text


def _calls(calls: object, key: str, origin: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, with arguments as an object, which chat templates expect."""
    if isinstance(calls, str):
        with contextlib.suppress(ValueError):
            calls = json.loads(calls) or []
    made = []
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (0, 0)
        try:
            # Arrow gives every call the arguments of all; in JSON a null is meant.
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else _without_nulls(arguments)
        except ValueError:
            arguments = 0
        if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
            do = 'write each call as {"type": "function", "function": {"name": "NAME", "arguments": {...}}}'
            raise _malformed(origin, f"{key} has {_kind(call)}", do)
        others = {k: v for k, v in call.items() if k not in ("function", "name", "arguments") and v is not None}
        made.append({"type": "function", **others, "function": {"name": name, "arguments": arguments or {}}})
    return made


def _without_nulls(value: Any) -> Any:
    """Without the fields that are null in objects, in any depth."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _ground_truth(value: object, key: str, origin: str) -> _Truth:
    """Without one it is empty: some rewards need none, and those that do refuse such a row."""
    if value is None or isinstance(value, str):
        return (value if value and value.strip() else ""), False
    if isinstance(value, float) and not math.isfinite(value):
        do = "fill in the right answer or remove the row; an answer that is infinite or none is a string"
        raise _malformed(origin, f"{key} is {_kind(value)}, no finite number", do)
    if not isinstance(value, Mapping | list | int | float):
        do = "write the right answer as a text, a number, a list or an object"
        raise _malformed(origin, f"{key} is {_kind(value)}", do)
    return json.dumps(value, ensure_ascii=False, default=str), True


def _extra(
    info: object, others: Mapping[str, object], origin: str
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """The pairs of `extra_info` and of other columns, and the keys of those whose text is JSON."""
    if not isinstance(info, Mapping | None):
        raise _malformed(origin, f"extra_info is {_kind(info)} instead of an object", "make it one or leave it out")
    if both := sorted(key for key in others.keys() & {*(info or {})} if others[key] != (info or {})[key]):
        raise _malformed(origin, f"{both[0]} as a column and in extra_info", "give one of them another name")
    values = {str(key): value for key, value in [*(info or {}).items(), *others.items()]}
    if "tools" in values:
        values["tools"] = _without_nulls(values["tools"])
    pairs = ((k, v if isinstance(v, str) else json.dumps(v, default=str)) for k, v in values.items())
    return tuple(pairs), tuple(key for key, value in values.items() if not isinstance(value, str))


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
