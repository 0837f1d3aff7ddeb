"""Requests of an agent at `/v1/chat/completions` and the answers, in OpenAI's JSON. Requests in other dialects are
translated to and from this form. Pure.

The recipe decides how tokens are sampled, so that training sees the distribution that it assumes: temperature, top_p,
seed and the like are accepted and ignored. So are a forced tool and a response format: the policy writes freely, and
the agent's own check asks again. Fields that would change the form of the answer (n, logprobs, functions and the like)
are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from asyncrl.chat.fields import Fields, Length, Text, asks_for_nothing, parsed, short, unsupported
from asyncrl.chat.http import frame
from asyncrl.chat.messages import Calls, Name, OfferedTool, for_template, signatures
from asyncrl.chat.reply import DONE, End, MadeCall, Reply, head, made_call, usage, written_parts
from asyncrl.data.tool_calls import Call, ToolCall, ToolSignature

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    # fields that would change the answer, with the values that have no effect
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
}


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """`messages` and `tools`: JSON in a canonical form. `max_tokens` None: the recipe's. `stop`: texts that end the
    reply. `is_repeated`: the client says that it has sent it before."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    stop: tuple[str, ...] = ()
    one_call: bool = False
    is_repeated: bool = False

    @property
    def signatures(self) -> tuple[ToolSignature, ...]:
        return signatures(self.tools)


@dataclass(frozen=True, slots=True)
class AgentReply:
    """`message`: the assistant's, as the agent should send it back."""

    message: dict[str, Any]
    end: End


_Flag = Annotated[bool, BeforeValidator(bool)]


class _Message(Fields):
    role: str
    content: Text = ""
    name: Name = None
    tool_call_id: Name = None
    tool_calls: Calls = None


class _StreamOptions(Fields):
    include_usage: _Flag = False


class _Body(Fields):
    """The fields that an agent can set; others are ignored."""

    messages: list[_Message] = Field(min_length=1, fail_fast=True, examples=[[{"role": "user", "content": "..."}]])
    tools: list[OfferedTool] = Field([], fail_fast=True, examples=[[{"type": "function", "function": {"name": "..."}}]])
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    stream: _Flag = False
    stop: Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = []  # noqa: RUF012
    parallel_tool_calls: _Flag = True
    stream_options: _StreamOptions = Field(_StreamOptions(), examples=[{"include_usage": True}])


def parse_request(body: object) -> AgentRequest:
    """Raises ApiError naming the field."""
    asked = parsed(_Body, body)
    assert isinstance(body, dict)
    for name, harmless in _REFUSED.items():
        value = body.get(name)
        if value is not None and not asks_for_nothing(value, harmless):
            raise unsupported(name, f"an agent that is trained cannot set {name}={short(value)}")
    return AgentRequest(
        messages=tuple(_with_own_ids(for_template(message)) for message in asked.messages),
        tools=tuple(body.get("tools") or ()) if body.get("tool_choice") != "none" else (),
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        stream=asked.stream,
        include_usage=asked.stream_options.include_usage,
        stop=tuple(text for text in asked.stop if text),
        one_call=not asked.parallel_tool_calls,
    )


def _with_own_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of calls as `reply_message` makes them; clients know them as `_wire` writes them."""
    made = dict(message)
    if "tool_call_id" in made:
        made["tool_call_id"] = made["tool_call_id"].replace("call_", "call", 1)
    if "tool_calls" in made:
        made["tool_calls"] = [{**c, "id": (c.get("id") or "").replace("call_", "call", 1)} for c in made["tool_calls"]]
    return made


def sent_id(own: str) -> str:
    """An id of a call as clients expect it; templates want nine characters without a line."""
    return own.replace("call", "call_", 1)


def reply_message(text: str, before: str, calls: Sequence[Call], number: int) -> dict[str, Any]:
    """The assistant's message in answer to request `number`. A text with a malformed call stays text for the agent.
    `before`: the part of `text` before its calls."""
    made = [call for call in calls if isinstance(call, ToolCall)]
    if not made or len(made) < len(calls):
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": before.strip(),
        "tool_calls": [
            {
                # deterministic, for replays; some templates want nine characters
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
                "finish_reason": reply.end.reason,
                "logprobs": None,
            }
        ],
        "usage": usage(reply.end.prompt_tokens, reply.end.completion_tokens),
        "weight_version": reply.end.version,
    }


def streamed(reply: AgentReply, model: str, *, include_usage: bool) -> Iterator[str]:
    """The frames of a streamed answer. The answer is complete before the first frame, since a call is known only at its
    end."""
    start = head("chatcmpl", "chat.completion.chunk", model)
    message = _wire(reply.message)
    for index, call in enumerate(message.get("tool_calls", ())):
        call["index"] = index
    for delta, reason in ((message, None), ({}, reply.end.reason)):
        yield frame({**start, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    if include_usage:
        used = usage(reply.end.prompt_tokens, reply.end.completion_tokens)
        yield frame({**start, "choices": [], "usage": used})
    yield DONE


def in_dialect(reply: AgentReply, writer: Reply) -> tuple[dict[str, Any], list[str]]:
    """The answer in the dialect of `writer`, as one body and as stream frames."""
    parts: list[str | MadeCall] = [reply.message["content"]] if reply.message["content"] else []
    for call in reply.message.get("tool_calls", ()):
        function = call["function"]
        parts.append(made_call(ToolCall(function["name"], function["arguments"]), sent_id(call["id"])))
    events = [*writer.begin(reply.end.prompt_tokens), *written_parts(writer, parts), *writer.end(reply.end)]
    return writer.whole(), [frame(data, name) for name, data in events]


def _wire(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as clients read it: arguments of calls as text, null for empty content of a message with calls."""
    made = dict(message)
    if "tool_calls" in made:
        made["content"] = made["content"] or None
        made["tool_calls"] = [
            {
                **call,
                "id": sent_id(call["id"]),
                "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
            }
            for call in made["tool_calls"]
        ]
    return made
