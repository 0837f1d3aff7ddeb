"""Anthropic's Messages API as a dialect of chat completions. Pure.

Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from asyncrl.chat.fields import ApiError, Fields, Length, Served, own_tools, parsed, unsupported
from asyncrl.chat.reply import Dialect, End, Event, MadeCall, Reply, text_of, texts_joined, with_system

_SIGNATURE = "unsigned"
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_ERRORS |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


class AnthropicTool(Fields):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None


class AnthropicChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class AnthropicMessage(Fields):
    model_config = ConfigDict(extra="forbid")

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class MessagesRequest(Served):
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mcp_servers": ([],)}
    information: ClassVar[tuple[str, ...]] = (
        "metadata", "cache_control", "thinking", "context_management", "output_config", "service_tier", "betas",
    )  # fmt: skip

    model: str | None = None
    max_tokens: Length
    messages: list[AnthropicMessage] = Field(min_length=1, examples=[[{"role": "user", "content": "..."}]])
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[AnthropicTool], own_tools(AnthropicTool)] = Field(
        [], examples=[[{"name": "...", "input_schema": {"type": "object"}}]]
    )
    tool_choice: AnthropicChoice | None = None
    stop_sequences: list[str] = []  # noqa: RUF012 - models copy their defaults
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False


def to_chat(body: object) -> dict[str, Any]:
    """The equivalent chat completion. Raises ApiError naming the field."""
    asked = parsed(MessagesRequest, body)
    messages = [made for number, m in enumerate(asked.messages) for made in _messages(number, m)]
    made = asked.model_dump(include={"model", "max_tokens", "temperature", "top_p", "top_k", "stream"}) | {
        "messages": with_system(texts_joined(asked.system or "", ("text",), "system"), messages),
        "tools": [_tool(tool) for tool in asked.tools],
        "stop": asked.stop_sequences or None,
    }
    choice = asked.tool_choice
    names = [tool.name for tool in asked.tools]
    if choice is not None and (choice.name in names if choice.type == "tool" else names or choice.type != "any"):
        named = {"type": "function", "function": {"name": choice.name or ""}}
        made["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        made["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return {name: value for name, value in made.items() if value is not None}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    return {"type": "function", "function": function | ({"description": tool.description} if tool.description else {})}


def _messages(number: int, message: AnthropicMessage) -> list[dict[str, Any]]:
    """One message as messages of chat completions: tool results of a user's message come before its text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for place, block in enumerate(message.content):
        where = f"messages[{number}].content[{place}]"
        match message.role, block.get("type"):
            case _, "text":
                texts.append(text_of(block.get("text"), f"{where}.text"))
            case "assistant", "thinking":
                thoughts.append(text_of(block.get("thinking"), f"{where}.thinking"))
            case "assistant", "redacted_thinking":
                pass  # only its provider can read it
            case "user", "image":
                texts.append(texts_joined([block], (), where))
            case "assistant", "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "user", "tool_result":
                text = texts_joined(block.get("content") or "", ("text",), f"{where}.content")
                text = f"Error: {text}" if block.get("is_error") else text  # chat completions have no error flag
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            case _, kind:
                found = f"blocks of type {str(kind)[:40]!r} are not served for {message.role}"
                raise unsupported(f"{where}.type", found)
    said: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    # A message with tool results only has no further user message.
    return [*results, said] if texts or calls or not results else results


class MessagesReply(Reply):
    """The content blocks of a message: text and calls in order."""

    def __init__(self, model: str, asked: Mapping[str, Any]) -> None:
        super().__init__(model, asked)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks: list[dict[str, Any]] = []
        self._open = ""
        """Type of the open block, text or thinking; empty: none is open."""
        self._pieces: list[str] = []
        self._end: End | None = None

    def ping(self) -> Event:
        return _event("ping")

    def begin(self, prompt_tokens: int) -> list[Event]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        return [_event("message_start", message=self.whole() | {"usage": usage})]

    def thought(self, text: str) -> list[Event]:
        return self._said("thinking", text)

    def text(self, text: str) -> list[Event]:
        return self._said("text", text)

    def call(self, call: MadeCall) -> list[Event]:
        events = self._close()
        begun = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        events += [
            self._about("start", content_block=begun),
            self._about("delta", delta={"type": "input_json_delta", "partial_json": call.arguments}),
            self._about("stop"),
        ]
        # Python's json reads and writes NaN, which JSON does not have
        self._blocks.append({**begun, "input": json.loads(call.arguments, parse_constant=lambda _: None)})
        return events

    def end(self, end: End) -> list[Event]:
        events = self._close()
        self._end = end
        body = self.whole()
        delta = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
        last = _event("message_delta", delta=delta, usage=body["usage"], weight_version=end.version)
        return [*events, last, _event("message_stop")]

    def whole(self) -> dict[str, Any]:
        end = self._end or End("", 0, 0, None)
        reasons = {"": None, "length": "max_tokens", "tool_calls": "tool_use"}
        reason = reasons.get(end.reason, "stop_sequence" if end.stop_string else "end_turn")
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            "stop_reason": reason,
            "stop_sequence": end.stop_string if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": end.prompt_tokens - end.cached_tokens,
                "cache_read_input_tokens": end.cached_tokens,
                "cache_creation_input_tokens": 0,
                "output_tokens": end.completion_tokens,
            },
            "weight_version": end.version,
        }

    def failed(self, error: ApiError) -> Event:
        return "error", error_body(error)

    def _said(self, kind: str, text: str) -> list[Event]:
        """A piece of a block of this type, in which the type names the text."""
        events: list[Event] = []
        if self._open != kind:
            events += self._close()
            self._open = kind
            events.append(self._about("start", content_block=_block(kind, "")))
        self._pieces.append(text)
        return [*events, self._about("delta", delta={"type": f"{kind}_delta", kind: text})]

    def _close(self) -> list[Event]:
        """Ends the open block, if any."""
        if not self._open:
            return []
        events, block = [self._about("stop")], _block(self._open, "".join(self._pieces))
        if self._open == "thinking":
            # Clients send thoughts without a signature back as text.
            block["signature"] = _SIGNATURE
            events.insert(0, self._about("delta", delta={"type": "signature_delta", "signature": _SIGNATURE}))
        self._blocks.append(block)
        self._open, self._pieces = "", []
        return events

    def _about(self, what: str, **data: Any) -> Event:
        return _event(f"content_block_{what}", index=len(self._blocks), **data)


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}


def without_length(body: object) -> object:
    """A body of `COUNT_TOKENS` as one of `MESSAGES`, which must name a length."""
    return {"max_tokens": 1, **body} if isinstance(body, dict) else body


COUNT_TOKENS = "/v1/messages/count_tokens"
MESSAGES = Dialect("/v1/messages", to_chat, MessagesReply, error_body, {"stop": "stop_sequences"})
