"""What clients may ask, checked field by field. Pure: JSON in, frozen records or ApiError out.

A field that is not served is refused by name rather than ignored, unless its value asks for nothing: the field's
default, null, or an empty list.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.data.rows import ChatMessage
from asyncrl.inference.shared.request_checks import MAX_TEMPERATURE, MAX_TOP_K, MIN_TEMPERATURE, MIN_TOP_P
from asyncrl.serving.errors import ApiError, bad_field, unsupported

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 1024
MAX_PROMPTS = 1024

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    # Fields that are not served, with the values that ask for nothing.
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
INFORMATION = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
"""Accepted and unused: they do not change the answer."""

_SHARED = {
    "model", "n", "stream", "stream_options", "temperature", "top_p", "top_k", "max_tokens", "min_tokens", "stop",
    "stop_token_ids", "seed", "logprobs", "return_token_ids", "ignore_eos", "skip_special_tokens",
}  # fmt: skip
_CHAT = _SHARED | {"messages", "max_completion_tokens"}
_COMPLETION = _SHARED | {"prompt"}


@dataclass(frozen=True, slots=True)
class Options:
    """Everything of a request but its prompt. `max_tokens` None: as many as fit. `seed` None: drawn by the server."""

    model: str | None
    n: int
    stream: bool
    include_usage: bool
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int | None
    logprobs: bool
    return_token_ids: bool
    ignore_eos: bool
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    messages: tuple[ChatMessage, ...]
    options: Options


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`prompts`: each a text or a tuple of token ids."""

    prompts: tuple[str | tuple[int, ...], ...]
    options: Options


def parse_chat(body: object) -> ChatRequest:
    """Raises ApiError naming the field."""
    fields = _Fields(body, _CHAT)
    raw = fields.take("messages", list, None)
    if not raw:
        raise bad_field("messages", "it is missing or empty", 'send [{"role": "user", "content": "..."}]')
    messages = tuple(_message(m, f"messages[{i}]") for i, m in enumerate(raw))
    limit = fields.integer("max_completion_tokens", None, least=1)
    logprobs = fields.values.get("logprobs", False)
    if not isinstance(logprobs, bool):
        raise unsupported("logprobs", f"{_short(logprobs)} is neither true nor false; alternatives are not known")
    return ChatRequest(messages, _options(fields, default_max_tokens=None, given_max_tokens=limit))


def parse_completion(body: object) -> CompletionRequest:
    """Raises ApiError naming the field."""
    fields = _Fields(body, _COMPLETION)
    return CompletionRequest(_prompts(fields.values.get("prompt")), _options(fields, default_max_tokens=16))


class _Fields:
    """The fields of a request body that are set (null counts as unset), each of a known name."""

    def __init__(self, body: object, known: set[str]) -> None:
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        self.values: dict[str, Any] = {}
        for name, value in body.items():
            if value is None or name in INFORMATION:
                continue
            if name not in known:
                if name not in HARMLESS:
                    raise unsupported(name)
                if not any(_same(value, harmless) for harmless in HARMLESS[name]):
                    raise unsupported(name, f"this server does not support {name}={_short(value)}")
                continue
            self.values[name] = value

    def take(self, name: str, kind: type, default: Any) -> Any:
        value = self.values.get(name, default)
        if kind is int:
            value = _whole(value)
        if value is not None and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
            raise bad_field(name, f"{_short(value)} is not of type {kind.__name__}", "correct its type")
        return value

    def integer(self, name: str, default: int | None, *, least: int, most: int | None = None) -> Any:
        value = self.take(name, int, default)
        if value is not None and (value < least or (most is not None and value > most)):
            limits = f"{least} to {most}" if most is not None else f"{least} or more"
            raise bad_field(name, f"{_short(value)} is out of range", f"choose {limits}")
        return value

    def number(self, name: str, default: float, *, least: float, most: float, besides: float | None = None) -> float:
        """`besides`: a value outside the range that is taken, too."""
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise bad_field(name, f"{_short(value)} is not a number", "correct its type")
        if value != besides and not least <= value <= most:
            limits = f"{least:g} to {most:g}" if besides is None else f"{besides:g}, or {least:g} to {most:g}"
            raise bad_field(name, f"{_short(value)} is out of range", f"choose {limits}")
        return float(value)


def _options(fields: _Fields, *, default_max_tokens: int | None, given_max_tokens: int | None = None) -> Options:
    max_tokens = fields.integer("max_tokens", default_max_tokens, least=1)
    max_tokens = given_max_tokens or max_tokens
    stream = fields.take("stream", bool, False)
    stream_options = fields.take("stream_options", dict, None)
    if stream_options is not None and not stream:
        raise bad_field("stream_options", "the request does not stream", "set stream=true or leave it out")
    for name, value in (stream_options or {}).items():
        if name not in ("include_usage", "include_obfuscation", "continuous_usage_stats"):
            raise unsupported(f"stream_options.{name}")
        if not isinstance(value, bool | None):
            raise bad_field("stream_options", f"{name} is {_short(value)}", "send true or false")
        if name != "include_usage" and value:
            raise unsupported(f"stream_options.{name}")
    min_tokens = fields.integer("min_tokens", 0, least=0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_field("min_tokens", f"{min_tokens} is more than max_tokens={max_tokens}", "lower min_tokens")
    return Options(
        model=fields.take("model", str, None),
        n=fields.integer("n", 1, least=1, most=MAX_CHOICES),
        stream=stream,
        include_usage=bool((stream_options or {}).get("include_usage")),
        temperature=fields.number("temperature", 1.0, least=MIN_TEMPERATURE, most=MAX_TEMPERATURE, besides=0),
        top_p=fields.number("top_p", 1.0, least=MIN_TOP_P, most=1),
        top_k=max(0, fields.integer("top_k", 0, least=-1, most=MAX_TOP_K)),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=_stop(fields.values.get("stop", [])),
        stop_token_ids=_stop_token_ids(fields.values.get("stop_token_ids", [])),
        seed=fields.take("seed", int, None),
        logprobs=_logprobs(fields.values.get("logprobs")),
        return_token_ids=fields.take("return_token_ids", bool, False),
        ignore_eos=fields.take("ignore_eos", bool, False),
        skip_special_tokens=fields.take("skip_special_tokens", bool, True),
    )


def _same(value: object, harmless: object) -> bool:
    """As JSON has it: true is not 1."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def _logprobs(value: object) -> bool:
    """Chat sends a boolean, completions the number of alternatives."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if value == 0:
        return True
    raise unsupported(
        "logprobs",
        f"logprobs={_short(value)} asks for alternatives, and only the sampled token's is known (logprobs=0)",
    )


def _stop(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise bad_field("stop", f"{_short(value)} is not a string or a list of them", "send non-empty strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_field("stop", f"{len(strings)} strings", f"send at most {MAX_STOP_STRINGS}")
    if (longest := max(map(len, strings), default=0)) > MAX_STOP_CHARACTERS:
        raise bad_field("stop", f"a string of {longest} characters", f"send at most {MAX_STOP_CHARACTERS}")
    return tuple(strings)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    ids = _token_ids("stop_token_ids", value)
    if len(ids) > MAX_STOP_TOKENS:
        raise bad_field("stop_token_ids", f"{len(ids)} ids", f"send at most {MAX_STOP_TOKENS}")
    return ids


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, list):
        value = [_whole(i) for i in value]
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise bad_field(name, f"{_short(value)} is not a list of token ids", "send integers from 0 on")
    return tuple(value)


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    if value is None or value == "" or value == []:
        raise bad_field("prompt", "it is missing or empty", "send a text or token ids")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise bad_field("prompt", f"{_short(value)} is neither text nor a list", "send a text or token ids")
    if type(_whole(value[0])) is int:
        return (_token_ids("prompt", value),)
    if len(value) > MAX_PROMPTS:
        raise bad_field("prompt", f"{len(value)} prompts", f"send at most {MAX_PROMPTS} in one request")
    prompts: list[str | tuple[int, ...]] = []
    for i, prompt in enumerate(value):
        if prompt in ("", []):
            raise bad_field("prompt", f"prompt {i} is empty", "send a text or token ids")
        prompts.append(prompt if isinstance(prompt, str) else _token_ids("prompt", prompt))
    return tuple(prompts)


def _message(value: object, where: str) -> ChatMessage:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise bad_field("messages", f"{where} has no role", 'send {"role": "user", "content": "..."}')
    for name, extra in value.items():
        if extra and name not in ("role", "content"):
            raise unsupported(f"{where}.{name}")
    return ChatMessage(value["role"], _content(value.get("content"), f"{where}.content"))


def _content(value: object, where: str) -> str:
    """Text as one string, or as OpenAI's list of text parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        texts = [part.get("text") for part in value]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise bad_field("messages", f"{where} is {_short(value)}", "send text: images and audio are not supported")


def _short(value: object) -> str:
    text = reprlib.repr(value)  # looks at the beginning of large and deep values only
    return text if len(text) <= 60 else text[:57] + "..."
