"""Messages and tools of OpenAI's clients, for the model server and the agent endpoint. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from asyncrl.chat.fields import MAX_DEPTH, Fields, Text, json_value
from asyncrl.data.call_splitter import text_in, thought_in
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


WRITTEN_BY_CLIENTS = ("refusal", "annotations", "thinking_blocks", "provider_specific_fields", "reasoning_details")
"""Fields of messages that clients add for themselves."""

_Thought = Annotated[
    str | None,
    BeforeValidator(lambda said: said if isinstance(said, str) and said else None, json_schema_input_type=Any),
]


class SentMessage(Fields):
    """`reasoning`: another name of `reasoning_content`."""

    role: str
    content: Text = ""
    reasoning_content: _Thought = None
    reasoning: _Thought = None
    name: Name = None
    tool_call_id: Name = None
    tool_calls: Calls = None


class Parameters(Fields):
    properties: dict[str, Any] | None = Field(default_factory=dict)


class ToolFunction(Fields):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: Parameters | None = Parameters()


class OfferedTool(Fields):
    type: Literal["function"] | None = "function"
    function: ToolFunction


class NamedFunction(Fields):
    name: Annotated[str, Field(min_length=1)]


class NamedTool(Fields):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Fields):
    model_config = ConfigDict(extra="ignore")

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def guide(self) -> dict[str, Any] | None:
        """The schema of the answer; None: any text."""
        if self.type == "json_schema":
            return {} if self.json_schema is None else self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


def signatures(tools: Sequence[Mapping[str, Any]]) -> tuple[ToolSignature, ...]:
    """Signatures, for parsers, of tools in OpenAI's form that were checked as `OfferedTool`s."""
    functions = [tool["function"] for tool in tools]
    return tuple(signature_of(function["name"], function.get("parameters") or {}) for function in functions)


def for_template(message: SentMessage) -> dict[str, Any]:
    """A checked message for chat templates, without unset fields."""
    made = {name: value for name, value in message.model_dump().items() if value is not None}
    if thought := made.pop("reasoning", None):
        made.setdefault("reasoning_content", thought)
    return made


def said_message(parts: Collection[object], calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The assistant's message of a whole chat completion. `calls`: of the parts, as `reply.call_body`."""
    message = {"role": "assistant", "content": text_in(parts) or (None if calls else ""), "refusal": None}
    if thought := thought_in(parts):
        message["reasoning_content"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def wish(schema: Mapping[str, Any] | None, tool_choice: Any, tools: Sequence[str]) -> str:
    """What a request asks of the form of its reply, in words; empty: nothing. `schema`: of its response format.
    `tools`: their names. The choice of another tool, such as one that a provider runs, asks nothing."""
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    if isinstance(function, dict) and function.get("name") in tools:
        return f"Call the tool {function['name']} now."
    if tools and tool_choice == "required":
        return "Call a tool now."
    if schema is None:
        return ""
    when = "If you call no tool, answer" if tools and tool_choice != "none" else "Answer"
    return f"{when} with nothing but JSON of this schema: {json.dumps(schema, ensure_ascii=False)}"


def with_wish(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """The messages with `text` at the end of the last one that is not the assistant's."""
    made = list(messages)
    others = [number for number, message in enumerate(made) if message["role"] != "assistant"] if text else []
    for number in others[-1:]:
        made[number] = {**made[number], "content": f"{made[number]['content']}\n\n{text}"}
    return made


def with_names(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tool's name added to each tool result: clients omit it, and some templates need it."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        named = message.get("role") != "tool" or "name" in message or message.get("tool_call_id") not in names
        made.append(dict(message) if named else {**message, "name": names[message["tool_call_id"]]})
    return made
