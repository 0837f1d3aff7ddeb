"""Parses tool calls in the policy's text. Pure.

Formats: `hermes`, JSON between <tool_call> tags (Qwen, Hermes); `json`, a response that is JSON objects (Llama 3);
`tagged`, `<name>arguments</name>`, where the arguments are a JSON object, or the text of the tool's first parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.data.call_values import (
    Call,
    MalformedCall,
    ToolCall,
    ToolSignature,
    from_json,
    from_value,
    not_json,
)
from asyncrl.data.template_calls import RenderedCalls, TemplateFormat, rendered_calls
from asyncrl.json_records import json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ParserName = Literal["hermes", "json", "tagged"]
CallParser = ParserName | TemplateFormat
"""What finds calls: a format by name, or that of a chat template."""

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_NAMED = '{"name": "NAME", "arguments": {...}}'
_WRITTEN: dict[str, str] = {
    "hermes": f"<tool_call>{_NAMED}</tool_call>",
    "json": '{"name": "NAME", "parameters": {...}}',
    "tagged": "<NAME>ARGUMENTS</NAME>",
}


Parser = Callable[[str, Sequence[ToolSignature]], list[Call]]


def parse_hermes(text: str, tools: Sequence[ToolSignature]) -> list[Call]:
    """The calls between <tool_call> tags, in order; malformed without a closing tag."""
    unclosed = MalformedCall("the call is not closed by </tool_call>")
    found = _HERMES.findall(text)
    return [from_json(body.strip(), _WRITTEN["hermes"]) if end else unclosed for body, end in found]


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
            calls.append(MalformedCall(not_json(error, _WRITTEN["json"])))
            break
        calls.append(from_value(value, _WRITTEN["json"]))
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
    return from_json(text, f"{opening}{_NAMED}{closing}")


def call_tags(parser: CallParser, tools: Sequence[ToolSignature]) -> dict[str, str]:
    """Opening tag -> closing tag, which is empty where calls end with the reply; none for `json`."""
    if isinstance(parser, TemplateFormat):
        return {parser.opening: parser.closing}
    if parser == "tagged":
        return {f"<{tool.name}>": f"</{tool.name}>" for tool in tools}
    return {"<tool_call>": "</tool_call>"} if parser == "hermes" else {}


class _Parsers(dict[Any, Parser]):
    """The parsers by name. That of a `TemplateFormat` is its own."""

    def __missing__(self, parser: TemplateFormat) -> Parser:
        return parser.parse


PARSERS = _Parsers({"hermes": parse_hermes, "json": parse_json, "tagged": parse_tagged})


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template; that for tools if the tokenizer has several."""
    templates = tokenizer.chat_template
    return str(templates.get("tool_use", templates.get("default")) if isinstance(templates, dict) else templates)


def parser_for(name: str, template: str) -> CallParser:
    """The parser `name`; `auto`: that of the calls that the chat template writes, hermes if it writes none."""
    if name != "auto":
        assert name in PARSERS, name
        return name  # type: ignore[return-value]
    return _calls_of(template)[0] or "hermes"


@cache
def _calls_of(template: str) -> tuple[CallParser | None, RenderedCalls | None]:
    """The format of a template's calls, of messages in any form, and the calls from which it is known."""
    for rendered in rendered_calls(template):
        named = (name for name, parse in PARSERS.items() if rendered.are_read(parse))
        if (found := next(named, None) or rendered.format()) is not None:
            return found, rendered
    return None, None


def described(schemas: Sequence[Mapping[str, Any]], parser: CallParser) -> str:
    """The tools and how to call them, in words."""
    listed = "\n".join(json.dumps(schema.get("function", schema)) for schema in schemas)
    return f"You can call these tools:\n{listed}\nTo call one, write {shown(parser)} and wait for its result."


def shown(parser: CallParser) -> str:
    """How a call is written."""
    return parser.shown if isinstance(parser, TemplateFormat) else _WRITTEN[parser]


def described_between(schemas: Sequence[Mapping[str, Any]], opening: str, closing: str, result: str) -> str:
    """`described` for calls of `parse_between`. `result`: how a result is shown."""
    listed = "\n".join(json.dumps(schema.get("function", schema)) for schema in schemas)
    inside = "ARGUMENTS" if len(schemas) == 1 else _NAMED
    return (
        f"You can use these tools while you write:\n{listed}\nTo use one, write {opening}{inside}{closing}. Its result "
        f"follows as {result}. Then go on."
    )


def written(name: str, arguments: Mapping[str, Any], parser: CallParser) -> str:
    """A call as the policy writes it in the format of `parser`."""
    if parser == "tagged":
        return f"<{name}>{json.dumps(arguments)}</{name}>"
    if parser == "json":
        return json.dumps({"name": name, "parameters": arguments})
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _tagged(tool: ToolSignature, text: str) -> Call:
    if (value := json_object(text)) is not None:
        return ToolCall(tool.name, value)
    if tool.first is None:
        return ToolCall(tool.name, {}) if not text else MalformedCall(f"{tool.name} takes no arguments", tool.name)
    return ToolCall(tool.name, {tool.first: text})


def _names_tool(text: str) -> bool:
    """True for a JSON object with a name and arguments, possibly in OpenAI's nesting."""
    value = json_object(text) or {}
    inner = value.get("function")
    value = inner if isinstance(inner, dict) else value
    return isinstance(value.get("name"), str) and bool({"arguments", "parameters"} & {*value})


# Tells the policy its tools: through the chat template if it supports tools, else in a system message.


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """`schemas`: one object per tool for the template's `tools` (OpenAI's function schema). `text`: the same in words,
    for templates without tools. `in_words`: use `text` always, because the template teaches another format."""

    schemas: tuple[Mapping[str, Any], ...]
    text: str
    in_words: bool = False

    def is_in(self, prompt: str) -> bool:
        """Whether a prompt names every tool and every parameter: some templates know one form of schemas only."""
        functions = [schema.get("function", schema) for schema in self.schemas]
        parameters = [found for function in functions if isinstance(found := function.get("parameters"), Mapping)]
        properties = (each.get("properties", each) or {} for each in parameters)
        keys = (key for each in properties for key in each if key not in ("type", "required"))
        return all(str(name) in prompt for name in (*(function["name"] for function in functions), *keys))


def tools_for(schemas: Sequence[Mapping[str, Any]], parser: CallParser, template: str) -> ToolPrompt:
    """Names the tools through the chat template where it writes calls as `parser` reads them, else in words. Of a
    template that writes no calls nothing is known but what the recipe says: `auto` has guessed hermes then."""
    written_as = _calls_of(template)[0]
    in_words = parser == "hermes" if written_as is None else written_as != parser
    return ToolPrompt(tuple(schemas), described(schemas, parser), in_words=in_words)


def with_tools(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: ToolPrompt | None,
    *,
    told_by: str = "system",
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and options for `apply_chat_template` that make the prompt name the tools; in words in a first message
    of `told_by`."""
    template = template_text(tokenizer)
    rendered = _calls_of(template)[1]
    plain = [dict(message) if rendered is None else rendered.takes(message) for message in messages]
    if tools is None or not tools.schemas:
        return plain, {}
    if re.search(r"\btools\b", template) and not tools.in_words:
        return plain, {"tools": [dict(schema) for schema in tools.schemas]}
    if plain and plain[0].get("role") == "system":
        plain[0]["content"] = f"{plain[0]['content']}\n\n{tools.text}"
        return plain, {}
    if plain and plain[0].get("role") == told_by:
        plain[0]["content"] = f"{tools.text}\n\n{plain[0]['content']}"
        return plain, {}
    return [{"role": told_by, "content": tools.text}, *plain], {}
