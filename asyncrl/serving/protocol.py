"""The requests of OpenAI's routes as pydantic models; the OpenAPI description is generated from them. Pure.

An unsupported field is refused by name rather than ignored, unless its value has no effect: the field's default, null,
or an empty list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from asyncrl.chat.fields import (
    HINTS,
    NOT_SERVED,
    WHOLE,
    Fields,
    Length,
    Served,
    Text,
    bad_field,
    short,
    unsupported,
    whole,
)
from asyncrl.chat.messages import MAX_TOOLS, WRITTEN_BY_CLIENTS, NamedTool, OfferedTool, ResponseFormat, SentMessage
from asyncrl.inference.shared.request_checks import MAX_TEMPERATURE, MAX_TOP_K, MIN_TEMPERATURE, MIN_TOP_P

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 1024
MAX_PROMPTS = 1024

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    # Unserved fields, with their values that have no effect.
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
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
INFORMATION = (*HINTS, "user", "metadata", "safety_identifier", "prompt_cache_key")
"""Accepted and ignored: they do not change the answer."""


def _temperature(value: float) -> float:
    if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        limits = {"least": MIN_TEMPERATURE, "most": MAX_TEMPERATURE}
        raise PydanticCustomError("range", "choose 0, or {least} to {most}", limits)
    return value


def _no_alternatives(value: Any) -> bool:
    """Chat sends a boolean; completions send the number of alternatives to the sampled token."""
    if not isinstance(value, bool) and value != 0:
        found = f"logprobs={short(value)} asks for alternatives, and only the sampled token's is known (logprobs=0)"
        raise unsupported("logprobs", found)
    return value if isinstance(value, bool) else True


def _no_number(value: Any) -> Any:
    if not isinstance(value, bool):
        raise unsupported("logprobs", f"{short(value)} is neither true nor false; alternatives are not known")
    return value


def _prompts(value: Any) -> Any:
    """A list of prompts; a single prompt (text or token ids) becomes a list of one."""
    one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(whole(value[0])) is int)
    return [value] if one else value


_WHOLE_ITEMS = BeforeValidator(lambda value: [whole(i) for i in value] if isinstance(value, list) else value)
_TEMPERATURE_SCHEMA = {
    "anyOf": [{"const": 0}, {"type": "number", "minimum": MIN_TEMPERATURE, "maximum": MAX_TEMPERATURE}]
}
_NOTHING_SCHEMA: Any = {"enum": [None, False, 0, "", [], {}]}

_TEXT_SCHEMA = [
    {"type": "string"},
    {"type": "array", "items": {"anyOf": [
        {"type": "object", "required": ["type", "text"], "properties": {
            "type": {"const": "text"}, "text": {"type": "string"}}},
        {"type": "object", "required": ["type", "image_url"], "properties": {
            "type": {"const": "image_url"}, "image_url": {"type": "object", "required": ["url"], "properties": {
                "url": {"type": "string", "pattern": "^data:image/[A-Za-z0-9.+-]+;base64,[A-Za-z0-9+/]+={0,2}$"}}}}},
    ]}},
]  # fmt: skip
_TOOL_EXAMPLE = {"type": "function", "function": {"name": "..."}}

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
PromptText = Annotated[str, Field(min_length=1)]
PromptIds = Annotated[TokenIds, Field(min_length=1), _WHOLE_ITEMS]
_LISTED = BeforeValidator(lambda v: [v] if isinstance(v, str) else v, json_schema_input_type=StopString | StopStrings)
Prompts = Annotated[list[PromptText | PromptIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class StreamOptions(Fields):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class Message(SentMessage):
    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": _NOTHING_SCHEMA})

    content: Annotated[Text, WithJsonSchema({"anyOf": [*_TEXT_SCHEMA, {"type": "null"}]})]  # type: ignore[misc]

    @model_validator(mode="before")
    @classmethod
    def _nothing_else(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        for name, value in message.items():
            if value and name not in cls.model_fields and name not in WRITTEN_BY_CLIENTS:
                raise PydanticCustomError(NOT_SERVED, "{name}", {"name": name})
        return {**message, "content": ""} if message.get("tool_calls") and message.get("content") is None else message


class Options(Served):
    """A request without its prompt. `max_tokens` None: as many as fit. `seed` None: chosen by the server."""

    harmless = HARMLESS
    information = INFORMATION

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, AfterValidator(_temperature), WithJsonSchema(_TEMPERATURE_SCHEMA)] = 1.0
    top_p: Annotated[float, Field(ge=MIN_TOP_P, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K), AfterValidator(lambda k: max(0, k)), WHOLE] = 0
    max_tokens: Length | None = None
    min_tokens: Annotated[int, Field(ge=0), WHOLE] = 0
    stop: Annotated[StopStrings, _LISTED] = []  # noqa: RUF012 - models copy their defaults
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS), _WHOLE_ITEMS] = []  # noqa: RUF012
    seed: Annotated[int, WHOLE] | None = None
    logprobs: Annotated[bool, BeforeValidator(_no_alternatives, json_schema_input_type=Literal[False, True, 0])] = False
    return_token_ids: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "the request does not stream", "set stream=true or leave it out")
        if self.longest is not None and self.min_tokens > self.longest:
            found = f"{self.min_tokens} is more than max_tokens={self.longest}"
            raise bad_field("min_tokens", found, "lower min_tokens")
        return self

    @property
    def longest(self) -> int | None:
        """Requested limit on the tokens of the answer."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Options):
    messages: list[Message] = Field(min_length=1, fail_fast=True, examples=[[{"role": "user", "content": "..."}]])
    max_completion_tokens: Length | None = None
    logprobs: Annotated[bool, BeforeValidator(_no_number, json_schema_input_type=bool)] = False
    tools: list[OfferedTool] = Field([], max_length=MAX_TOOLS, fail_fast=True, examples=[[_TOOL_EXAMPLE]])
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _of_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise bad_field("tools", "two of them have the same name", "give each a name of its own")
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if wanted is not None and wanted not in names:
            raise bad_field("tool_choice", f"no tool is named {short(wanted)}", "name one of the request's tools")
        if self.tool_choice == "required" and not names:
            raise bad_field("tool_choice", "the request has no tools", "send tools, or leave it out")
        form = self.response_format
        if form is not None and form.type == "json_schema" and form.json_schema is None:
            raise bad_field("response_format", "json_schema is missing", "send the schema")
        return self

    @property
    def calls_tools(self) -> bool:
        """The reply may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def guide(self) -> dict[str, Any] | None:
        """The JSON schema of `response_format`; None without one."""
        return None if self.response_format is None else self.response_format.guide

    @property
    def forced(self) -> bool:
        """The reply must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Options):
    prompt: Annotated[Prompts, BeforeValidator(_prompts, json_schema_input_type=PromptText | PromptIds | Prompts)]
    max_tokens: Length | None = 16


def forced_call(asked: ChatRequest, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of one call of the tool that `tool_choice` names, or of any tool. `tools`: as the client sent
    them.

    The schema of each tool's arguments goes under `$defs`, with its references to itself redirected there, so that two
    tools may use one name for different definitions.
    """
    named = asked.tool_choice.function.name if isinstance(asked.tool_choice, NamedTool) else None
    functions = [tool["function"] for tool in tools if named in (None, tool["function"]["name"])]
    calls: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}
    for number, function in enumerate(functions):
        place = f"#/$defs/arguments{number}"
        arguments[f"arguments{number}"] = _moved(function.get("parameters") or {"type": "object"}, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"$defs": arguments, **(calls[0] if len(calls) == 1 else {"anyOf": calls})}


def _moved(schema: Any, place: str) -> Any:
    """A JSON schema with the references to its own root (`#`) redirected to `place`, the root's new location."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        made["$ref"] = place + reference[1:]
    return made
