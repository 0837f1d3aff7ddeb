"""Parses tool calls in the policy's text. Pure.

Formats: `hermes`, JSON between <tool_call> tags (Qwen, Hermes); `json`, a response that is JSON objects (Llama 3);
`tagged`, `<name>arguments</name>`, where the arguments are a JSON object, or the text of the tool's first parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ParserName = Literal["hermes", "json", "tagged"]

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_NAMED = '{"name": "NAME", "arguments": {...}}'
_WRITTEN: dict[str, str] = {
    "hermes": f"<tool_call>{_NAMED}</tool_call>",
    "json": '{"name": "NAME", "parameters": {...}}',
    "tagged": "<NAME>ARGUMENTS</NAME>",
}


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
    """The part of a tool that parsers need; `first`: name of its first parameter."""

    name: str
    first: str | None = None


Call = ToolCall | MalformedCall
Parser = Callable[[str, Sequence[ToolSignature]], list[Call]]


def parse_hermes(text: str, tools: Sequence[ToolSignature]) -> list[Call]:
    """The calls between <tool_call> tags, in order; malformed without a closing tag."""
    calls: list[Call] = []
    for match in _HERMES.finditer(text):
        if not match[2]:
            calls.append(MalformedCall("the call is not closed by </tool_call>"))
        else:
            calls.append(_from_json(match[1].strip(), _WRITTEN["hermes"]))
    return calls


def parse_json(text: str, tools: Sequence[ToolSignature]) -> list[Call]:
    """The calls of a response that consists of JSON objects with a name; any other text has no calls."""
    rest = re.sub(r"^\s*<\|python_tag\|>", "", text).strip()
    if re.match(r'\{\s*"(name|type|function)"\s*:', rest) is None:
        return []
    decoder, calls = json.JSONDecoder(), []
    # A response may hold several objects, separated by blanks, semicolons or commas.
    while rest.startswith("{"):
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            calls.append(MalformedCall(_not_json(error, _WRITTEN["json"])))
            break
        calls.append(_from_value(value, _WRITTEN["json"]))
        rest = rest[end:].lstrip(" \t\r\n;,")
    return calls


def parse_tagged(text: str, tools: Sequence[ToolSignature]) -> list[Call]:
    """The calls `<name>arguments</name>` of known tools, in order; malformed without a closing tag."""
    names = {tool.name: tool for tool in tools}
    if not names:
        return []
    opening = re.compile("<(" + "|".join(map(re.escape, names)) + ")>")
    calls: list[Call] = []
    at = 0
    while (begun := opening.search(text, at)) is not None:
        name = begun[1]
        end = text.find(f"</{name}>", begun.end())
        if end < 0:
            calls.append(MalformedCall(f"the call is not closed by </{name}>", name))
            break
        calls.append(_tagged(names[name], text[begun.end() : end].strip()))
        at = end + len(name) + 3
    return calls


def parse_between(text: str, tools: Sequence[ToolSignature], opening: str, closing: str) -> Call:
    """The call of the `text` between `opening` and `closing`: JSON with the tool's name; or, for a single tool, its
    arguments as a JSON object or the text of its first parameter."""
    text = text.strip()
    if len(tools) == 1 and not _names_tool(text):
        return _tagged(tools[0], text)
    return _from_json(text, f"{opening}{_NAMED}{closing}")


TAGS: dict[ParserName, Callable[[Sequence[ToolSignature]], dict[str, str]]] = {
    "hermes": lambda tools: {"<tool_call>": "</tool_call>"},
    "tagged": lambda tools: {f"<{tool.name}>": f"</{tool.name}>" for tool in tools},
}
"""Format -> (opening tag -> closing tag), for formats with tags."""

PARSERS: dict[ParserName, Parser] = {"hermes": parse_hermes, "json": parse_json, "tagged": parse_tagged}


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template; all of them joined if the tokenizer has several."""
    templates = tokenizer.chat_template
    return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)


def parser_for(name: str, template: str) -> ParserName:
    """The parser `name`; `auto`: the format of the chat template, hermes if it has none."""
    if name != "auto":
        assert name in PARSERS, name
        return name  # type: ignore[return-value]
    return format_of(template) or "hermes"


def format_of(template: str) -> ParserName | None:
    """The format in which a chat template writes calls; None if it writes none, or an unsupported one."""
    if "<tool_call>" in template:
        return "hermes"
    return "json" if re.search(r'ipython|<\|python_tag\|>|[\'"]parameters\\*"', template) else None


def described(schemas: Sequence[Mapping[str, Any]], parser: ParserName) -> str:
    """The tools and how to call them, in words."""
    listed = "\n".join(json.dumps(schema.get("function", schema)) for schema in schemas)
    return f"You can call these tools:\n{listed}\nTo call one, write {_WRITTEN[parser]} and wait for its result."


def described_between(schemas: Sequence[Mapping[str, Any]], opening: str, closing: str, result: str) -> str:
    """`described` for calls of `parse_between`. `result`: how a result is shown."""
    listed = "\n".join(json.dumps(schema.get("function", schema)) for schema in schemas)
    inside = "ARGUMENTS" if len(schemas) == 1 else _NAMED
    return (
        f"You can use these tools while you write:\n{listed}\nTo use one, write {opening}{inside}{closing}. Its result "
        f"follows as {result}. Then go on."
    )


def written(name: str, arguments: Mapping[str, Any], parser: ParserName) -> str:
    """A call as the policy writes it in the format of `parser`."""
    if parser == "tagged":
        return f"<{name}>{json.dumps(arguments)}</{name}>"
    if parser == "json":
        return json.dumps({"name": name, "parameters": arguments})
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _tagged(tool: ToolSignature, text: str) -> Call:
    if text.startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return ToolCall(tool.name, value)
    if tool.first is None:
        return ToolCall(tool.name, {}) if not text else MalformedCall(f"{tool.name} takes no arguments", tool.name)
    return ToolCall(tool.name, {tool.first: text})


def _names_tool(text: str) -> bool:
    """True for a JSON object with a name and arguments, possibly in OpenAI's nesting."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    return (
        isinstance(value, dict) and isinstance(value.get("name"), str) and bool({"arguments", "parameters"} & {*value})
    )


def _from_json(text: str, shown: str) -> Call:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return MalformedCall(_not_json(error, shown))
    return _from_value(value, shown)


def _from_value(value: object, shown: str) -> Call:
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
            return MalformedCall(_not_json(error, shown), value["name"])
    if not isinstance(arguments, dict):
        return MalformedCall(f"the arguments are no object; write {shown}", value["name"])
    return ToolCall(value["name"], arguments)


def _not_json(error: Exception, shown: str) -> str:
    what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
    return f"the call is not JSON ({what}); write {shown}"


# Tells the policy its tools: through the chat template if it supports tools, else in a system message.


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """`schemas`: one object per tool for the template's `tools` (OpenAI's function schema). `text`: the same in words,
    for templates without tools. `in_words`: use `text` always, because the template teaches another format."""

    schemas: tuple[Mapping[str, Any], ...]
    text: str
    in_words: bool = False


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the chat template renders tools."""
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        return "tool_use" in templates or any(_names_tools(t) for t in templates.values())
    return _names_tools(str(templates))


def with_tools(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: ToolPrompt | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and options for `apply_chat_template` that make the prompt name the tools."""
    plain = [dict(message) for message in messages]
    if tools is None or not tools.schemas:
        return plain, {}
    if takes_tools(tokenizer) and not tools.in_words:
        return plain, {"tools": [dict(schema) for schema in tools.schemas]}
    if plain and plain[0].get("role") == "system":
        plain[0]["content"] = f"{plain[0]['content']}\n\n{tools.text}"
        return plain, {}
    return [{"role": "system", "content": tools.text}, *plain], {}


def _names_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None
