"""The requests of an agent at `/v1/chat/completions` and the answers to them, in OpenAI's JSON. Pure.

The recipe decides how tokens are sampled, so that training sees the distribution that it assumes: temperature, top_p,
seed and the like are accepted and ignored. Fields that would change the answer in other ways (n, stop, a forced tool, a
response format) are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from asyncrl.data.tool_calls import Call, ToolCall, ToolSignature
from asyncrl.serving.bodies import head, usage
from asyncrl.serving.errors import unsupported
from asyncrl.serving.fields import Fields, Length, Text, asks_for_nothing, parsed, short

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    # fields that would change the answer, with the values that ask for nothing
    "n": (1,),
    "stop": ([], ""),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
}


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """`messages` and `tools`: JSON in a form in which what means the same is the same. `max_tokens` None: the
    recipe's."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    max_tokens: int | None
    stream: bool
    include_usage: bool

    @property
    def signatures(self) -> tuple[ToolSignature, ...]:
        found = []
        for tool in self.tools:
            properties = (tool["function"].get("parameters") or {}).get("properties") or {}
            found.append(ToolSignature(tool["function"]["name"], next(iter(properties), None)))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class AgentReply:
    """`message`: the assistant's, as the agent should send it back. `finish_reason`: OpenAI's."""

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    version: int


def _loaded(arguments: Any) -> Any:
    """The arguments of a call as an object; clients send them as text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
    except (ValueError, RecursionError):
        raise PydanticCustomError("json", "send the arguments of a call as valid JSON") from None


_Name = Annotated[str | None, BeforeValidator(lambda value: str(value) if value else None)]
_Flag = Annotated[bool, BeforeValidator(bool)]


class _Function(Fields):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_loaded)] = Field(default_factory=dict)


class _Call(Fields):
    id: Annotated[str, BeforeValidator(str)] = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(Fields):
    role: str
    content: Text = ""
    name: _Name = None
    tool_call_id: _Name = None
    tool_calls: Annotated[list[_Call] | None, BeforeValidator(lambda calls: calls or None)] = None


class _StreamOptions(Fields):
    include_usage: _Flag = False


class _Parameters(Fields):
    properties: dict[str, Any] = Field(default_factory=dict)


class _ToolFunction(Fields):
    name: str
    parameters: _Parameters = _Parameters()


class _Tool(Fields):
    function: _ToolFunction


class _Body(Fields):
    """The fields that an agent can set; others are taken and unused."""

    messages: list[_Message] = Field(min_length=1, fail_fast=True, examples=[[{"role": "user", "content": "..."}]])
    tools: list[_Tool] = Field([], fail_fast=True, examples=[[{"type": "function", "function": {"name": "..."}}]])
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    stream: _Flag = False
    stream_options: _StreamOptions = Field(_StreamOptions(), examples=[{"include_usage": True}])


def parse_request(body: object) -> AgentRequest:
    """Raises ApiError naming the field."""
    asked = parsed(_Body, body)
    assert isinstance(body, dict)
    for name, harmless in _REFUSED.items():
        value = body.get(name)
        if value is not None and not asks_for_nothing(value, harmless):
            raise unsupported(name, f"an agent that is trained cannot set {name}={short(value)}")
    messages = ({name: value for name, value in m.model_dump().items() if value is not None} for m in asked.messages)
    return AgentRequest(
        messages=tuple(messages),
        tools=tuple(body.get("tools") or ()) if body.get("tool_choice") != "none" else (),
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        stream=asked.stream,
        include_usage=asked.stream_options.include_usage,
    )


def reply_message(text: str, calls: Sequence[Call], number: int) -> dict[str, Any]:
    """The assistant's message in answer to request `number`. A text with a malformed call stays text for the agent."""
    made = [call for call in calls if isinstance(call, ToolCall)]
    if not made or len(made) < len(calls):
        return {"role": "assistant", "content": text}
    before = text.split("<tool_call>", 1)[0].strip() if "<tool_call>" in text else ""
    return {
        "role": "assistant",
        "content": before,
        "tool_calls": [
            {
                # the same in a replay; some templates want nine characters
                "id": f"call{number % 1000:03d}{index % 100:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for index, call in enumerate(made)
        ],
    }


def whole(reply: AgentReply, model: str) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    return {
        **head("chatcmpl", "chat.completion", model),
        "choices": [
            {
                "index": 0,
                "message": {**_wire(reply.message), "refusal": None},
                "finish_reason": reply.finish_reason,
                "logprobs": None,
            }
        ],
        "usage": usage(reply.prompt_tokens, reply.completion_tokens),
        "weight_version": reply.version,
    }


def streamed(reply: AgentReply, model: str, *, include_usage: bool) -> Iterator[dict[str, Any]]:
    """The pieces of a streamed answer: it is whole before the first is sent, since a call is known at its end."""
    start = head("chatcmpl", "chat.completion.chunk", model)
    message = _wire(reply.message)
    for index, call in enumerate(message.get("tool_calls", ())):
        call["index"] = index
    for delta, reason in ((message, None), ({}, reply.finish_reason)):
        yield {**start, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if include_usage:
        yield {**start, "choices": [], "usage": usage(reply.prompt_tokens, reply.completion_tokens)}


def _wire(message: Mapping[str, Any]) -> dict[str, Any]:
    """With the arguments of calls as text, which is how clients read them; null for no content beside calls."""
    made = dict(message)
    if "tool_calls" in made:
        made["content"] = made["content"] or None
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in made["tool_calls"]
        ]
    return made
