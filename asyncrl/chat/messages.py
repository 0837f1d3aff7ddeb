"""Messages and tools of OpenAI's clients, for the model server and the agent endpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from asyncrl.chat.fields import MAX_DEPTH, Fields, json_value
from asyncrl.data.call_values import ToolSignature, signature_of

MAX_TOOLS = 1024


def _loaded(arguments: Any) -> Any:
    """The arguments of a call as an object; clients send JSON text."""
    if arguments is None or arguments == "":
        return {}
    try:
        return json_value(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        do = "send the arguments of a call as valid JSON of at most {levels} levels"
        raise PydanticCustomError("json", do, {"levels": MAX_DEPTH}) from None


Name = Annotated[
    str | None, BeforeValidator(lambda value: None if value == "" else value, json_schema_input_type=str | None)
]


class Function(Fields):
    name: str
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_loaded, json_schema_input_type=str | dict[str, Any] | None)
    ] = Field(default_factory=dict)


class CallOfMessage(Fields):
    id: str | None = ""
    type: Literal["function"] | None = "function"
    function: Function


Calls = Annotated[
    list[CallOfMessage] | None,
    BeforeValidator(lambda calls: None if calls == [] else calls, json_schema_input_type=list[CallOfMessage] | None),
]


class Parameters(Fields):
    properties: dict[str, Any] | None = Field(default_factory=dict)


class ToolFunction(Fields):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: Parameters | None = Parameters()


class OfferedTool(Fields):
    type: Literal["function"] | None = "function"
    function: ToolFunction


def signatures(tools: Sequence[Mapping[str, Any]]) -> tuple[ToolSignature, ...]:
    """Signatures, for parsers, of tools in OpenAI's form that were checked as `OfferedTool`s."""
    functions = [tool["function"] for tool in tools]
    return tuple(signature_of(function["name"], function.get("parameters") or {}) for function in functions)


def for_template(message: Fields) -> dict[str, Any]:
    """A checked message for chat templates, without unset fields."""
    return {name: value for name, value in message.model_dump().items() if value is not None}


def with_names(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tool's name added to each tool result: clients omit it, and some templates need it."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        named = message.get("role") != "tool" or "name" in message or message.get("tool_call_id") not in names
        made.append(dict(message) if named else {**message, "name": names[message["tool_call_id"]]})
    return made
