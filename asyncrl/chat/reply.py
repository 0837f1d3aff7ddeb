"""A reply in the form of an API other than chat completions: its events if streamed, else its body.

A dialect translates its request into a chat completion, which is checked and answered like any other, and translates
the reply back. Pure.
"""

from __future__ import annotations

import json
import secrets
import string
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from asyncrl.chat.fields import SEND_TEXT, ApiError, bad_field, part_text, short
from asyncrl.chat.http import frame
from asyncrl.data.call_splitter import Thought
from asyncrl.data.tool_calls import ToolCall

DONE = "data: [DONE]\n\n"
"""Ends a stream of chat completions."""

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""

PING_S = 5.0
"""Longest silence of a stream while the model generates: proxies close silent connections."""
COMMENT = ": the model is writing\n\n"
"""Ignored by clients of server-sent events."""

_LETTERS_AND_DIGITS = string.ascii_letters + string.digits

Event = tuple[str, dict[str, Any]]
"""Name and data of a server-sent event."""


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A tool call with the id that its result refers to. `arguments`: JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class End:
    """`reason`: stop, length or tool_calls. `stop_string`: the stop string that ended the text. `version`: of the
    newest weights that wrote a token. `of_choice`: further fields, in chat completions."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    version: int | None
    cached_tokens: int = 0
    stop_string: str | None = None
    of_choice: Mapping[str, Any] = field(default_factory=dict)


class Reply(ABC):
    """Writes one reply: `begin`, `thought`, `text` and `call` in order, `end`. Each returns stream events; after `end`,
    `whole` is the body of an unstreamed answer."""

    done: ClassVar[str] = ""
    """Ends a stream, after the last event."""

    def __init__(self, model: str, asked: Mapping[str, Any]) -> None:
        """
        Args:
            model: the served name.
            asked: the body of the accepted request.
        """
        self._model = model
        self._asked = asked

    def ping(self) -> Event | None:
        """The API's event without content, for pauses of a stream; None: the API has none."""
        return None

    @abstractmethod
    def begin(self, prompt_tokens: int) -> list[Event]: ...

    @abstractmethod
    def thought(self, text: str) -> list[Event]: ...

    @abstractmethod
    def text(self, text: str) -> list[Event]: ...

    @abstractmethod
    def call(self, call: MadeCall) -> list[Event]: ...

    @abstractmethod
    def end(self, end: End) -> list[Event]: ...

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...

    @abstractmethod
    def failed(self, error: ApiError) -> Event:
        """The last event of a stream that fails."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API other than chat completions.

    Attributes:
        path: of its requests.
        to_chat: translates a body to the equivalent chat completion. Raises ApiError naming the field.
        reply: writes the answer.
        error: the body of an error, in unstreamed answers.
        names: this API's names of fields of chat completions, where they differ.
    """

    path: str
    to_chat: Callable[[object], dict[str, Any]]
    reply: type[Reply]
    error: Callable[[ApiError], dict[str, Any]]
    names: Mapping[str, str]

    def renamed(self, error: ApiError) -> ApiError:
        """The error with this API's name for the field at fault."""
        name = self.names.get(error.param or "")
        if name is None or error.param is None:
            return error
        message = error.message.replace(error.param, name, 1)
        return ApiError(error.status, message, param=name, code=error.code)


def call_id() -> str:
    """An id for a tool call. Some templates want nine letters and digits."""
    return "call" + "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(5))


def made_call(call: ToolCall, made_id: str) -> MadeCall:
    """The call for clients, with arguments as JSON text. Unpaired surrogates become question marks."""
    arguments = json.dumps(call.arguments, ensure_ascii=False).encode(errors="replace").decode()
    return MadeCall(made_id, call.name.encode(errors="replace").decode(), arguments)


def text_of(value: Any, where: str) -> str:
    """The value, if it is text. Raises ApiError naming `where`, its place in the request."""
    if not isinstance(value, str):
        raise _no_text(value, where)
    return value


def texts_joined(content: Any, kinds: Sequence[str], where: str) -> str:
    """The text of a content that is a string or has parts of these types, or images. Raises ApiError for other content;
    `where`: its place in the request."""
    if not isinstance(content, list):
        return text_of(content, where)
    texts = []
    for number, part in enumerate(content):
        if (text := part_text(part, kinds)) is None:
            raise _no_text(part, f"{where}[{number}]")
        texts.append(text)
    return "".join(texts)


def _no_text(value: Any, where: str) -> ApiError:
    found = "it is missing" if value is None else f"{short(value)} cannot be served"
    return bad_field(where, found, SEND_TEXT)


def with_system(text: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages after a system message of `text`, merged with their own system message."""
    if not text:
        return messages
    if messages and messages[0].get("role") == "system" and isinstance(messages[0].get("content"), str):
        joined = {**messages[0], "content": f"{text}\n\n{messages[0]['content']}"}
        return [joined, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def ping_of(reply: Reply) -> str:
    """The frame for a pause of its stream."""
    event = reply.ping()
    return COMMENT if event is None else frame(event[1], event[0])


def written_parts(reply: Reply, parts: Sequence[str | MadeCall]) -> list[Event]:
    """The events of these parts, written in order."""
    events: list[Event] = []
    for part in parts:
        if isinstance(part, MadeCall):
            events += reply.call(part)
        else:
            events += reply.thought(part) if isinstance(part, Thought) else reply.text(part)
    return events


def call_body(call: MadeCall) -> dict[str, Any]:
    """A call in the form of assistant messages."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprob_of(text: str, logprob: float) -> dict[str, Any]:
    """A sampled token of an answer. Its bytes are None if it holds only part of a character."""
    made = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": made, "top_logprobs": []}


def head(prefix: str, kind: str, model: str, request_id: str = "") -> dict[str, Any]:
    """The common start of all bodies. The id is `prefix` and the request's id, or a random one."""
    made_id = f"{prefix}-{request_id or secrets.token_hex(12)}"
    return {"id": made_id, "object": kind, "created": int(time.time()), "model": model}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
