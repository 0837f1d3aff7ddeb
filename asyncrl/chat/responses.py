"""OpenAI's Responses API as a dialect of chat completions. Stateless: a conversation is sent as a whole. Pure.

Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from asyncrl.chat.fields import (
    HINTS,
    ApiError,
    Fields,
    Length,
    Served,
    bad_field,
    own_choice,
    own_tools,
    parsed,
    unsupported,
)
from asyncrl.chat.reply import Dialect, End, Event, MadeCall, Reply, text_of, texts_joined, with_system

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class FlatTool(Fields):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: str


class FlatChoice(Fields):
    type: Literal["function"]
    name: str


class Format(Fields):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Fields):
    format: Format | None = None
    verbosity: str | None = None


class ResponsesRequest(Served):
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "truncation": ("disabled", "auto"),
        "include": ([], ["reasoning.encrypted_content"]),
        "top_logprobs": (0,),
        "stream_options": ({}, {"include_obfuscation": False}),
    }
    information: ClassVar[tuple[str, ...]] = (
        *HINTS, "user", "metadata", "safety_identifier", "prompt_cache_key", "client_metadata", "reasoning",
    )  # fmt: skip

    model: str | None = None
    input: str | list[dict[str, Any]] = Field(examples=["..."])
    instructions: str | None = None
    tools: Annotated[list[FlatTool], own_tools(FlatTool)] = Field([], examples=[[{"type": "function", "name": "..."}]])
    tool_choice: Annotated[Literal["none", "auto", "required"] | FlatChoice | None, BeforeValidator(own_choice)] = None
    parallel_tool_calls: bool = True
    max_output_tokens: Length | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    stream: bool = False


def to_chat(body: object) -> dict[str, Any]:
    """The equivalent chat completion. Raises ApiError naming the field."""
    asked = parsed(ResponsesRequest, body)
    choice: Any = asked.tool_choice
    if isinstance(choice, FlatChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    made = asked.model_dump(include={"model", "parallel_tool_calls", "temperature", "top_p", "stream"}) | {
        "messages": with_system(asked.instructions, _messages(asked.input)),
        "tools": [_tool(tool.model_dump()) for tool in asked.tools],
        "tool_choice": choice,
        "max_tokens": asked.max_output_tokens,
    }
    if asked.text is not None and asked.text.format is not None:
        form = asked.text.format.model_dump()
        kind = form.pop("type")
        made["response_format"] = {"type": kind, "json_schema": form} if kind == "json_schema" else {"type": kind}
    return {name: value for name, value in made.items() if value is not None}


def _messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages; the text and the calls of one assistant turn become one message. Raises ApiError naming the
    item."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    made: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        match item.get("type", "message"):
            case "message":
                role = "system" if item.get("role") == "developer" else text_of(item.get("role"), f"{where}.role")
                text = texts_joined(item.get("content"), _TEXT_PARTS, f"{where}.content")
                if role == "assistant":
                    _turn(made)["content"].append(text)
                else:
                    made.append({"role": role, "content": [text]})
            case "function_call":
                name = text_of(item.get("name"), f"{where}.name")
                function = {"name": name, "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                _turn(made).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                text = texts_joined(item.get("output"), _TEXT_PARTS, f"{where}.output")
                made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": [text]})
            case "reasoning":
                text = texts_joined(item.get("content") or item.get("summary") or "", _TEXT_PARTS, f"{where}.content")
                _turn(made).setdefault("reasoning_content", []).append(text)
            case kind:
                raise unsupported(f"{where}.type", f"items of type {str(kind)[:40]!r} are not served")
    texts, said = ("content", "reasoning_content"), [m for m in made if m["content"] or "tool_calls" in m]
    if not said:
        raise bad_field("input", "it is empty", 'send "..."')
    return [m | {name: "".join(m[name]) for name in texts if name in m} for m in said]


def _turn(made: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end of `made`, appended if another role is last. Its `content` is a list of texts,
    joined after the last item since a turn may have very many."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": []})
    return made[-1]


def _tool(flat: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in flat.items() if name != "type"}}


class ResponsesReply(Reply):
    """The items of a response. Thoughts, and text before, between and after calls, form separate items."""

    def __init__(self, model: str, asked: Mapping[str, Any]) -> None:
        super().__init__(model, asked)
        self._id = _new_id("resp")
        self._created_at = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The open message or reasoning item."""
        self._pieces: list[str] = []
        self._number = 0
        self._end: End | None = None

    def ping(self) -> Event:
        """Codex counts events, not comments, as signs of life."""
        return self._event("response.in_progress", response=self.whole())

    def begin(self, prompt_tokens: int) -> list[Event]:
        del prompt_tokens  # reported at the end
        body = self.whole()
        return [self._event(f"response.{name}", response=body) for name in ("created", "in_progress")]

    def thought(self, text: str) -> list[Event]:
        events = self._begin({"type": "reasoning", "id": _new_id("rs"), "summary": []})
        self._pieces.append(text)
        return [*events, self._event("response.reasoning_text.delta", delta=text, **self._content)]

    def text(self, text: str) -> list[Event]:
        events = self._begin({"type": "message", "id": _new_id("msg"), "role": "assistant"})
        if events:
            events.append(self._event("response.content_part.added", part=_part(""), **self._content))
        self._pieces.append(text)
        return [*events, self._event("response.output_text.delta", delta=text, logprobs=[], **self._content)]

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        """Opens the item, unless one of its type is open."""
        if self._open is not None and self._open["type"] == item["type"]:
            return []
        events = self._close()
        self._open = {**item, "status": "in_progress", "content": []}
        return [*events, self._event("response.output_item.added", item=dict(self._open), **self._place)]

    def call(self, call: MadeCall) -> list[Event]:
        events = self._close()
        item = {"type": "function_call", "id": _new_id("fc"), "call_id": call.id, "name": call.name}
        place, begun = self._place, {**item, "arguments": "", "status": "in_progress"}
        made = {**item, "arguments": call.arguments, "status": "completed"}
        about = {"item_id": item["id"], **place}
        # The arguments arrive whole, so one delta carries them.
        name = "response.function_call_arguments"
        events += [
            self._event("response.output_item.added", item=begun, **place),
            self._event(f"{name}.delta", delta=call.arguments, **about),
            self._event(f"{name}.done", arguments=call.arguments, name=call.name, **about),
            self._event("response.output_item.done", item=made, **place),
        ]
        self._items.append(made)
        return events

    def end(self, end: End) -> list[Event]:
        # An answer without text and calls has an empty message.
        kinds = {item["type"] for item in (*self._items, self._open) if item is not None}
        events = self.text("") if kinds <= {"reasoning"} and end.reason != "length" else []
        events += self._close("incomplete" if end.reason == "length" else "completed")
        self._end = end
        body = self.whole()
        return [*events, self._event(f"response.{body['status']}", response=body)]

    def whole(self) -> dict[str, Any]:
        end, asked = self._end, self._asked
        cut = end is not None and end.reason == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": "in_progress" if end is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            **{name: asked.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")},
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "truncation": "disabled",
            "usage": None if end is None else _usage(end),
            "metadata": asked.get("metadata") or {},
            "weight_version": None if end is None else end.version,
        }

    def failed(self, error: ApiError) -> Event:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._items)}

    @property
    def _content(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "content_index": 0, **self._place}

    def _close(self, status: str = "completed") -> list[Event]:
        """Ends the open item, if any."""
        if self._open is None:
            return []
        text, place, content = "".join(self._pieces), self._place, self._content
        is_message = self._open["type"] == "message"
        part = _part(text) if is_message else {"type": "reasoning_text", "text": text}
        item = {**self._open, "status": status, "content": [part]}
        self._items.append(item)
        self._open, self._pieces = None, []
        if is_message:
            events = [self._event("response.output_text.done", text=text, logprobs=[], **content)]
            events.append(self._event("response.content_part.done", part=part, **content))
        else:
            events = [self._event("response.reasoning_text.done", text=text, **content)]
        return [*events, self._event("response.output_item.done", item=item, **place)]

    def _event(self, kind: str, **data: Any) -> Event:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number - 1, **data}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(end: End) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


RESPONSES = Dialect(
    "/v1/responses",
    to_chat,
    ResponsesReply,
    ApiError.body,
    {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"},
)
