"""Requests of an agent at `/v1/chat/completions` and the answers, in OpenAI's JSON. Requests in other dialects are
translated to and from this form. Pure.

The recipe decides how tokens are sampled, so that training sees the distribution that it assumes: temperature, top_p,
seed and the like are accepted and ignored. A forced tool and a response format are asked for in the prompt: the policy
writes freely, and the agent's own check asks again. Fields that would change the form of the answer (n, functions and
the like) are refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from asyncrl.chat.fields import ApiError, Fields, Length, asks_for_nothing, parsed, short, unsupported
from asyncrl.chat.messages import OfferedTool, ResponseFormat, SentMessage, for_template, said_message, signatures, wish
from asyncrl.chat.reply import DONE, Dialect, End, Event, MadeCall, Reply, call_body, head, made_call, usage
from asyncrl.data.call_splitter import Part, Thought, text_in, thought_in
from asyncrl.data.tool_calls import ToolCall, ToolSignature

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    # fields that would change the answer, with the values that have no effect
    "n": (1,),
    "top_logprobs": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
}


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """`messages` and `tools`: JSON in a canonical form. `max_tokens` None: the recipe's. `stop`: texts that end the
    reply. `wish`: the asked form of the reply, in words. `key`: of the client, the same when it sends the request
    again. `is_repeated`: it says that it does."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    max_tokens: int | None
    stream: bool
    stop: tuple[str, ...] = ()
    one_call: bool = False
    wish: str = ""
    logprobs: bool = False
    token_ids: bool = False
    key: str = ""
    is_repeated: bool = False

    @property
    def signatures(self) -> tuple[ToolSignature, ...]:
        return signatures(self.tools)


@dataclass(frozen=True, slots=True)
class AgentReply:
    """`message`: the assistant's, in the form of `AgentRequest`. `parts`: of it, for clients."""

    message: dict[str, Any]
    parts: tuple[str | MadeCall, ...]
    end: End


_Flag = Annotated[bool, BeforeValidator(bool)]


class _Body(Fields):
    """The fields that an agent can set; others are ignored."""

    messages: list[SentMessage] = Field(min_length=1, fail_fast=True, examples=[[{"role": "user", "content": "..."}]])
    tools: list[OfferedTool] = Field([], fail_fast=True, examples=[[{"type": "function", "function": {"name": "..."}}]])
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    stream: _Flag = False
    stop: Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = []  # noqa: RUF012
    parallel_tool_calls: _Flag = True
    stream_options: dict[str, Any] = Field({}, examples=[{"include_usage": True}])
    response_format: ResponseFormat | None = None
    tool_choice: Any = None
    logprobs: _Flag = False
    return_token_ids: _Flag = False


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
        stop=tuple(text for text in asked.stop if text),
        one_call=not asked.parallel_tool_calls,
        wish=wish(
            None if asked.response_format is None else asked.response_format.guide,
            asked.tool_choice,
            [tool.function.name for tool in asked.tools],
        ),
        logprobs=asked.logprobs,
        token_ids=asked.return_token_ids,
    )


def _with_own_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of calls as `reply_of` makes them: clients expect `call_`, templates nine characters."""
    made = dict(message)
    if "tool_call_id" in made:
        made["tool_call_id"] = made["tool_call_id"].replace("call_", "call", 1)
    if "tool_calls" in made:
        made["tool_calls"] = [{**c, "id": (c.get("id") or "").replace("call_", "call", 1)} for c in made["tool_calls"]]
    return made


def reply_of(parts: Sequence[Part], number: int, end: End) -> AgentReply:
    """The reply to request `number` of a trajectory."""
    message: dict[str, Any] = {"role": "assistant", "content": text_in(parts)}
    if thought := thought_in(parts):
        message["reasoning_content"] = thought
    if calls := [part for part in parts if isinstance(part, ToolCall)]:
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        message["tool_calls"] = [
            {"id": f"call{number % 1000:03d}{i % 100:02d}", "type": "function", "function": function}
            for i, function in enumerate(functions)
        ]
        end = replace(end, reason="tool_calls")
    return AgentReply(message, tuple(sent_parts(parts, number)), end)


def sent_parts(parts: Iterable[Part], number: int, num_calls: int = 0) -> list[str | MadeCall]:
    """Parts of the reply to request `number`, for clients. Ids of calls are deterministic, for replays, and short,
    since some templates want nine characters. `num_calls`: in the parts before."""
    calls = itertools.count(num_calls)
    return [
        made_call(part, f"call_{number % 1000:03d}{next(calls) % 100:02d}") if isinstance(part, ToolCall) else part
        for part in parts
    ]


class ChatReply(Reply):
    """A chat completion."""

    done = DONE

    def __init__(self, model: str, asked: Mapping[str, Any]) -> None:
        super().__init__(model, asked)
        self._head = head("chatcmpl", "chat.completion", model)
        self._parts: list[str | MadeCall] = []
        self._end = End("", 0, 0, None)

    def begin(self, prompt_tokens: int) -> list[Event]:
        return [self._piece({"role": "assistant", "content": ""})]

    def thought(self, text: str) -> list[Event]:
        self._parts.append(Thought(text))
        return [self._piece({"reasoning_content": text})]

    def text(self, text: str) -> list[Event]:
        self._parts.append(text)
        return [self._piece({"content": text})]

    def call(self, call: MadeCall) -> list[Event]:
        self._parts.append(call)
        return [self._piece({"tool_calls": [{"index": len(self._calls) - 1, **call_body(call)}]})]

    def end(self, end: End) -> list[Event]:
        self._end = end
        events = [self._piece({}, end.reason, **end.of_choice)]
        if (self._asked.get("stream_options") or {}).get("include_usage"):
            events.append(("", {**self._streamed, "choices": [], "usage": self._usage}))
        return events

    def whole(self) -> dict[str, Any]:
        end, message = self._end, said_message(self._parts, self._calls)
        choice = {"index": 0, "message": message, "finish_reason": end.reason, "logprobs": None, **end.of_choice}
        return {**self._head, "choices": [choice], "usage": self._usage, "weight_version": end.version}

    def failed(self, error: ApiError) -> Event:
        return "", error.body()

    @property
    def _calls(self) -> list[dict[str, Any]]:
        return [call_body(part) for part in self._parts if isinstance(part, MadeCall)]

    @property
    def _usage(self) -> dict[str, Any]:
        return usage(self._end.prompt_tokens, self._end.completion_tokens)

    @property
    def _streamed(self) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk"}

    def _piece(self, delta: dict[str, Any], reason: str | None = None, **further: Any) -> Event:
        return "", {**self._streamed, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, **further}]}


def _as_it_is(body: object) -> Any:
    return body


CHAT = Dialect("/v1/chat/completions", _as_it_is, ChatReply, ApiError.body, {})
