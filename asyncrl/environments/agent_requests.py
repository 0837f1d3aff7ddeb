"""What an agent asks at `/v1/chat/completions` and what it is answered, in OpenAI's JSON. Pure.

Sampling is the recipe's, so that what is trained is what was sampled: temperature, top_p, seed and the like are taken
and unused. What would change the answer in other ways (n, stop, a forced tool, a response format) is refused by name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.environments.tool_calls import Call, ToolCall, ToolSignature
from asyncrl.serving.errors import ApiError, bad_field, unsupported

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


def parse_request(body: object) -> AgentRequest:
    """Raises ApiError naming the field."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    for name, harmless in _REFUSED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name, f"an agent that is trained cannot set {name}={json.dumps(value)[:60]}")
    raw = body.get("messages")
    if not isinstance(raw, list) or not raw:
        raise bad_field("messages", "it is missing or empty", 'send [{"role": "user", "content": "..."}]')
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise bad_field("max_tokens", f"{limit!r} is no number of tokens", "send 1 or more")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise bad_field("stream_options", "it is no object", 'send {"include_usage": true}')
    tools = body.get("tools") or []
    if body.get("tool_choice") == "none":
        tools = []
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise bad_field("tools", "not a list of functions", 'send [{"type": "function", "function": {"name": ...}}]')
    return AgentRequest(
        messages=tuple(canonical(m, f"messages[{i}]") for i, m in enumerate(raw)),
        tools=tuple(tools),
        max_tokens=limit,
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
    )


def canonical(message: object, where: str) -> dict[str, Any]:
    """One message: role, content as one text, tool calls with their arguments as objects. Raises ApiError."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_field("messages", f"{where} has no role", 'send {"role": "user", "content": "..."}')
    made: dict[str, Any] = {"role": message["role"], "content": _content(message.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if message.get(name):
            made[name] = str(message[name])
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise bad_field("messages", f"{where}.tool_calls is no list", "send back the message that you were given")
        made["tool_calls"] = [_call(call, where) for call in calls]
    return made


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
        **_head("chat.completion", model),
        "choices": [
            {
                "index": 0,
                "message": {**_wire(reply.message), "refusal": None},
                "finish_reason": reply.finish_reason,
                "logprobs": None,
            }
        ],
        "usage": _usage(reply),
        "weight_version": reply.version,
    }


def streamed(reply: AgentReply, model: str, *, include_usage: bool) -> Iterator[dict[str, Any]]:
    """The pieces of a streamed answer: it is whole before the first is sent, since a call is known at its end."""
    head = _head("chat.completion.chunk", model)
    message = _wire(reply.message)
    for index, call in enumerate(message.get("tool_calls", ())):
        call["index"] = index
    for delta, reason in ((message, None), ({}, reply.finish_reason)):
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if include_usage:
        yield {**head, "choices": [], "usage": _usage(reply)}


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


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def _usage(reply: AgentReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    parameters = function.get("parameters") or {}
    return isinstance(parameters, dict) and isinstance(parameters.get("properties") or {}, dict)


def _content(value: object, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    raise bad_field("messages", f"{where}.content is no text", "send text: images and audio are not supported")


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_field("messages", f"{where}.tool_calls is malformed", "send back the message that you were given")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise bad_field("messages", f"{where}: a call's arguments are not JSON", "send valid JSON") from None
    if not isinstance(arguments, dict):
        raise bad_field("messages", f"{where}: a call's arguments are no object", 'send {"NAME": VALUE, ...}')
    made = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": made}
