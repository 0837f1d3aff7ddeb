"""Tool calls, and how they are read from JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """An unusable call. `error`: for the policy to read."""

    error: str
    name: str = "tool"


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """The part of a tool that parsers need. `first`: name of its first parameter. `types`: parameter -> JSON types that
    its schema names."""

    name: str
    first: str | None = None
    types: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)


Call = ToolCall | MalformedCall

_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def signature_of(name: str, parameters: Mapping[str, Any]) -> ToolSignature:
    """`parameters`: the tool's JSON schema."""
    properties = parameters.get("properties") or {}
    types = {key: frozenset(_types(schema)) for key, schema in properties.items()}
    return ToolSignature(name, next(iter(properties), None), types)


def value_of(text: str, types: frozenset[str]) -> Any:
    """The value of a parameter that is written without quotes. `types`: as in `ToolSignature`; empty if unknown."""
    if types and types <= {"string", "null"}:
        return None if text == "null" and "null" in types else text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _PYTHON_WORDS.get(text.strip(), text)


def _types(schema: object) -> Iterable[str]:
    if not isinstance(schema, Mapping):
        return
    for branch in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        yield from _types(branch)
    named = schema.get("type")
    yield from named if isinstance(named, list) else [named] if isinstance(named, str) else ()
    if named is None and schema.get("enum") and all(isinstance(value, str) for value in schema["enum"]):
        yield "string"


def from_json(text: str, shown: str) -> Call:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return MalformedCall(not_json(error, shown))
    return from_value(value, shown)


def from_value(value: object, shown: str) -> Call:
    """Also accepts OpenAI's nesting {"function": {"name", "arguments"}} and arguments as a JSON string. `shown`: the
    format, for the policy to read."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall(f"the call has no name; write {shown}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return MalformedCall(not_json(error, shown), value["name"])
    if not isinstance(arguments, dict):
        return MalformedCall(f"the arguments are no object; write {shown}", value["name"])
    return ToolCall(value["name"], arguments)


def not_json(error: Exception, shown: str) -> str:
    what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
    return f"the call is not JSON ({what}); write {shown}"
