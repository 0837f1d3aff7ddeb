"""The format of tool calls of a chat template. It is derived: the template renders a call whose parts are known, where
they stand in the text is the format, and it is taken if it reads the rendered calls back.

A call is JSON that holds its name and arguments; or its name, then a JSON object; or its name, then parameters in tags;
or Python. It stands between an opening and a closing text, alone or among others.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any

import jinja2

from asyncrl.data.call_values import Call, MalformedCall, ToolCall, ToolSignature, from_value, not_json, value_of

# What the template renders. All of it can be told from what the template itself writes.
_TOOL, _FIRST, _SECOND, _TEXT, _NUMBER = "tool7391", "first7391", "second7391", "text7391", 4682
_QUESTION, _REPLY, _SENTINEL = "question7391", "reply7391", "7391"
_CALL = ToolCall(_TOOL, {_FIRST: _TEXT, _SECOND: _NUMBER})
_TYPES = {_FIRST: "string", _SECOND: "integer"}
_SIGNATURE = ToolSignature(_TOOL, _FIRST, {key: frozenset([kind]) for key, kind in _TYPES.items()})
_PROPERTIES = {key: {"type": kind, "description": "d"} for key, kind in _TYPES.items()}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": [*_TYPES]}
_SCHEMA = {"type": "function", "function": {"name": _TOOL, "description": "d", "parameters": _PARAMETERS}}
_IDS = ("call73910", f"functions.{_TOOL}:0")
"""Some templates want nine letters and digits, others write the id in place of the name."""
_TOKENS: Any = {f"{name}_token": f"<{name}{_SENTINEL}>" for name in ("bos", "eos", "unk", "pad")}
_SHOWN = {_TOOL: "NAME", _FIRST: "PARAMETER", _SECOND: "OTHER_PARAMETER", _TEXT: "TEXT", str(_NUMBER): "1"}

_NAME = r"""([^\s<>{}()\[\]"'=:,|]++)"""
_MARK = r"[<\[][^<>\[\]]*[>\]]"
_WORD = rf"{_MARK}|[^<>\[\]\s]+"
_SHORTEST_MARK = 3
_LONGEST_TAIL = 400
_TWICE = len(("before", "between", "after"))

# Readers of calls. `read` returns the calls at the start of a text, at least one, and the rest of it. `tools`: by name.
# `shown`: the format, for the policy to read.


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """A JSON object, or a list of them, with the keys that lead to `name` and `arguments`."""

    name: tuple[str, ...]
    arguments: tuple[str, ...]

    def read(self, text: str, tools: Mapping[str, ToolSignature], shown: str) -> tuple[list[Call], str]:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [MalformedCall(not_json(error, shown))], ""
        calls: list[Call] = []
        for item in value if isinstance(value, list) else [value]:
            arguments = _inside(item, self.arguments)
            found = {"name": _inside(item, self.name), "arguments": {} if arguments is None else arguments}
            calls.append(from_value(found, shown))
        return calls or [_unreadable(shown)], text[end:]


@dataclass(frozen=True, slots=True)
class NamedObject:
    """A name, the text that `head` matches, and a JSON object. `quote`: stands for the quotes of strings, and keys have
    none; empty: plain JSON."""

    head: str
    quote: str

    def read(self, text: str, tools: Mapping[str, ToolSignature], shown: str) -> tuple[list[Call], str]:
        named = re.match(rf"{_NAME}\s*+{self.head}\s*+", text)
        if named is None:
            return [_unreadable(shown)], ""
        text = text[named.end() :]
        if self.quote:
            mark = re.escape(self.quote)
            # A string, or a word, which is a key before a colon.
            words = rf"{mark}(?P<string>.*?){mark}|(?P<word>[^\s{{}}\[\],:\"]++)(?=(?P<colon>\s*:)?)"
            text = re.sub(words, _quoted, text, flags=re.DOTALL)
        try:
            arguments, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [MalformedCall(not_json(error, shown), named[1])], ""
        return [from_value({"name": named[1], "arguments": arguments}, shown)], text[end:]


@dataclass(frozen=True, slots=True)
class TaggedParameters:
    """A name, the text that `head` matches, and parameters, each of which `pair` matches: groups key, kind and value.
    `kind`: that of strings, where the template writes kinds; else types are those of the tool's schema."""

    head: str
    pair: str
    kind: str

    def read(self, text: str, tools: Mapping[str, ToolSignature], shown: str) -> tuple[list[Call], str]:
        named = re.match(rf"{_NAME}\s*+{self.head}\s*+", text)
        if named is None:
            return [_unreadable(shown)], ""
        types = tools[named[1]].types if named[1] in tools else {}
        pair, end, arguments = re.compile(self.pair, re.DOTALL), named.end(), {}
        while found := pair.match(text, end):
            key, kind, value = found["key"], found["kind"], found["value"]
            is_text = frozenset(["string"] if kind == self.kind else ())
            arguments[key] = value_of(value, is_text if self.kind else types.get(key, frozenset()))
            end = found.end()
        return [ToolCall(named[1], arguments)], text[end:]


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A Python call with keywords, several in lines, or a list of them."""

    def read(self, text: str, tools: Mapping[str, ToolSignature], shown: str) -> tuple[list[Call], str]:
        code = re.match(r"\[.*\)\s*\]|.*\)|", text, re.DOTALL)
        assert code is not None
        try:
            with warnings.catch_warnings(action="ignore"):
                lines = ast.parse(code[0]).body
            calls: list[Call] = [call for line in lines for call in _python_calls(line)]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            return [MalformedCall(f"the call is not Python ({error}); write {shown}")], ""
        return calls or [_unreadable(shown)], text[code.end() :]


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """A format of calls that a chat template writes.

    Attributes:
        opening: begins a call, or a section of calls; no ordinary reply has it.
        closing: ends what `opening` begins; empty: the end of the reply does.
        may_be_open: the closing text ends the turn, so that it may be missing at the end of a reply.
        before: begins a section. `unit`: begins each call; may be empty.
        tails: what may follow a call, without blanks.
        shown: a call, for the policy to read.
    """

    opening: str
    closing: str
    may_be_open: bool
    before: str
    unit: str
    tails: tuple[str, ...]
    shown: str
    reader: JsonCalls | NamedObject | TaggedParameters | PythonCalls

    def parse(self, text: str, tools: Sequence[ToolSignature]) -> list[Call]:
        """The calls in order."""
        known, calls, at = {tool.name: tool for tool in tools}, [], 0
        while (begun := text.find(self.opening, at)) >= 0:
            end = text.find(self.closing, begun + len(self.opening)) if self.closing else -1
            at = len(text) if end < 0 else end + len(self.closing)
            found = self._section(text[begun:at], known)
            if end < 0 and self.closing and not self.may_be_open:
                found[-1] = MalformedCall(f"the call is not closed by {self.closing}; write {self.shown}")
            calls += found
        return calls

    def _section(self, text: str, known: Mapping[str, ToolSignature]) -> list[Call]:
        """At least one call."""
        head = re.match(rf"{_lenient(self.before)}\s*{_lenient(self.unit)}", text)
        if head is None:
            return [_unreadable(self.shown)]
        text, calls = text[head.end() :], []
        for unit in re.split(_lenient(self.unit), text) if self.unit else [text]:
            rest, goes_on = unit, True
            while goes_on:
                found, rest = self.reader.read(rest.lstrip(" \t\r\n,;"), known, self.shown)
                is_broken = any(isinstance(call, MalformedCall) for call in found)
                goes_on = not is_broken and not self._is_tail(rest)
                if goes_on and self.unit:  # it begins each call: what follows is no other one
                    found, goes_on = [_unreadable(self.shown)], False
                calls += found
        return calls

    def _is_tail(self, rest: str) -> bool:
        rest = rest.strip()
        return len(rest) < _LONGEST_TAIL and any(tail.startswith(_dense(rest)) for tail in self.tails)


@dataclass(frozen=True, slots=True)
class RenderedCalls:
    """What a template writes of one call and of two, behind what it writes of any reply.

    Attributes:
        two: None if it writes one call at most.
        reply: an ordinary reply. `ends_as_reply`: its end was found, and taken, from the end of the calls.
        content: of a message with calls and no text. `arguments_are_text`: the template takes them as JSON.
    """

    one: str
    two: str | None
    reply: str
    ends_as_reply: bool
    content: str | None
    arguments_are_text: bool

    def are_read(self, parse: Callable[[str, Sequence[ToolSignature]], list[Call]]) -> bool:
        texts = [(self.one, [_CALL])] if self.two is None else [(self.one, [_CALL]), (self.two, [_CALL, _CALL])]
        return all(parse(text, [_SIGNATURE]) == calls for text, calls in texts)

    def takes(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message in the form in which the template writes its calls."""
        if not message.get("tool_calls"):
            return dict(message)
        calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
        for call in calls if self.arguments_are_text else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return {**message, "content": message.get("content") or self.content, "tool_calls": calls}

    def format(self) -> TemplateFormat | None:
        """The format that reads the calls; None if none does."""
        for reader, start in self._readers():
            found, rest = reader.read(self.one[start:], {_TOOL: _SIGNATURE}, "")
            if found == [_CALL]:
                form = self._format(reader, self.one[start : len(self.one) - len(rest)])
                if form is not None and self.are_read(form.parse):
                    return form
        return None

    def _readers(self) -> Iterator[tuple[Any, int]]:
        """Readers that may read the call, and where it starts."""
        one = self.one
        for brace in re.finditer("{", one):
            try:
                value, _ = json.JSONDecoder().raw_decode(one, brace.start())
            except (ValueError, RecursionError):
                continue
            name, arguments = _keys_to(_CALL.name, value), _keys_to(_CALL.arguments, value)
            if name and arguments:
                yield JsonCalls(name, arguments), brace.start()
        start = one.rfind(_TOOL, 0, max(one.find(_FIRST), 0))
        if start < 0:
            return
        after = one[start + len(_TOOL) :]
        head = after.partition("{")[0]
        # The text up to the last mark may differ: ids, and types of the arguments.
        mark = re.search(rf"{_MARK}[^<>\[\]]*$", head)
        quote = re.search(rf"{_FIRST}\s*:\s*(\S\S+){_TEXT}", after)
        yield NamedObject(rf"[^{{]*?{_lenient(mark[0])}" if mark else _lenient(head), quote[1] if quote else ""), start
        yield PythonCalls(), start
        if (tagged := _tagged_reader(after)) is not None:
            yield tagged, start

    def _format(self, reader: Any, call: str) -> TemplateFormat | None:
        before, _, after = self.one.partition(call)
        between = None
        if self.two is not None and len(parts := re.split(_lenient(call), self.two)) == _TWICE:
            before, between, after = parts
        before = re.split(f"{_TOOL}|{_IDS[0]}", before)[-1]
        if isinstance(reader, JsonCalls | PythonCalls):
            before, after = before.rstrip("[ \n"), after.lstrip("] \n")
        unit, close = before.strip(), after
        if between is not None:
            unit = _from_mark(_shared_end(before, between)).strip(" \n,;")
            close = _to_mark(shared_start(between, after))
        section = before.strip().removesuffix(unit)
        opening = next((text for text in _heads(before) if text not in self.reply), "")
        end, closing = close, next(reversed(re.findall(_WORD, close)), "")
        if section:  # it ends behind its last call, with what no call has
            closing = next((text for text in _heads(after[len(close) :]) if text not in call + close), "")
            end = f"{close}{closing}"
        if len(opening) < _SHORTEST_MARK or opening.isalpha() or 0 < len(closing) < _SHORTEST_MARK:
            return None  # an ordinary text may have it
        if _SENTINEL in repr((opening, closing, section, unit, reader)):
            return None
        if isinstance(reader, TaggedParameters) and not unit:
            return None
        tails = {_dense(text) for text in (close, end, (between or "").strip().removesuffix(unit))}
        shown = "".join(self.one.partition(opening)[1:])
        shown = shown[: shown.rfind(closing) + len(closing)] if closing in shown else shown
        return TemplateFormat(
            opening=opening,
            closing=closing,
            may_be_open=not self.ends_as_reply,
            before=section,
            unit=unit,
            tails=tuple(sorted(tail for tail in tails if _SENTINEL not in tail)),
            shown=re.sub("|".join(_SHOWN), lambda found: _SHOWN[found[0]], shown),
            reader=reader,
        )


def rendered_calls(template: str) -> Iterator[RenderedCalls]:
    """Renderings by the ways in which templates take calls: the content empty or None, the arguments as an object or as
    JSON, the id of one form or another. None of a template that fails, or does not write the call."""
    if "tool_calls" not in template:
        return
    prompt, reply = _rendered(template, more=True), _rendered(template, {"role": "assistant", "content": _REPLY})
    end = reply.partition(_REPLY)[2].strip()
    for content, is_text, id_ in product(("", None), (False, True), _IDS):
        arguments = json.dumps(_CALL.arguments) if is_text else _CALL.arguments
        call = {"type": "function", "id": id_, "function": {"name": _TOOL, "arguments": arguments}}
        turns = [{"role": "assistant", "content": content, "tool_calls": [call] * number} for number in (1, 2)]
        one, two = (_rendered(template, turn) for turn in turns)
        start = max(len(shared_start(one, prompt)), len(shared_start(one, reply)))
        start = len(_to_mark(one[:start]))
        if _TEXT in one[start:]:
            yield RenderedCalls(
                one=one[start:].rstrip().removesuffix(end),
                two=two[start:].rstrip().removesuffix(end) if two.count(_TEXT) > 1 else None,
                reply=reply[start:],
                ends_as_reply=one.rstrip().endswith(end),
                content=content,
                arguments_are_text=is_text,
            )


def _rendered(template: str, *turn: Mapping[str, Any], more: bool = False) -> str:
    """Empty if the template fails."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages: Any = [[{"role": "user", "content": _QUESTION}, *turn]]
    options = {"chat_template": template, "add_generation_prompt": more, **_TOKENS}
    try:
        made: Any = render_jinja_template(messages, tools=[_SCHEMA], **options)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return ""
    return made[0][0]


def _tagged_reader(after: str) -> TaggedParameters | None:
    """`after`: what follows the name."""
    parts = re.search(rf"(.*?){_FIRST}(.*?){_TEXT}(.*?){_SECOND}(.*?){_NUMBER}(.*)", after, re.DOTALL)
    if parts is None:
        return None
    head, separator, between, other, end = parts.groups()
    close = _to_mark(shared_start(between, end)).rstrip()
    key = _from_mark(_shared_end(head, between.removeprefix(close)))
    if not close.strip() or not key.strip():
        return None
    # Where the two separators differ they tell strings from other values.
    same = shared_start(separator, other)
    tail = _shared_end(separator[len(same) :], other[len(same) :])
    kind = separator[len(same) : len(separator) - len(tail)]
    middle = rf"{_lenient(same)}(?P<kind>{'[^<>]*?' if kind else ''}){_lenient(tail)}"
    # A line that the template itself begins around a value is not part of it; other blanks are.
    opened, closed = separator[len(separator.rstrip()) :], close[: len(close) - len(close.lstrip())]
    value = rf"(?:{re.escape(opened)})?(?P<value>.*?)(?:{re.escape(closed)})?{_lenient(close)}"
    pair = rf"\s*{_lenient(key)}(?P<key>[^\s<>\[\]]+?){middle}{value}"
    return TaggedParameters(_lenient(head.removesuffix(key)), pair, kind)


def _python_calls(line: ast.stmt) -> Iterator[ToolCall]:
    """Raises ValueError, TypeError: not a call, or not of literals."""
    value = line.value if isinstance(line, ast.Expr) else None
    for call in value.elts if isinstance(value, ast.List) else [value]:
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("no call with keywords")
        arguments = {word.arg: ast.literal_eval(_JsonWords().visit(word.value)) for word in call.keywords}
        yield ToolCall(ast.unparse(call.func), json.loads(json.dumps(arguments)))


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _keys_to(wanted: object, value: object) -> tuple[str, ...]:
    """The keys that lead to `wanted`, possibly written as JSON, in a JSON object; empty if none do."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if item in (wanted, json.dumps(wanted)):
            return (key,)
        if keys := _keys_to(wanted, item):
            return (key, *keys)
    return ()


def _quoted(word: re.Match[str]) -> str:
    if word["string"] is not None:
        return json.dumps(word["string"])
    return json.dumps(word["word"]) if word["colon"] else word["word"]


def _inside(value: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _unreadable(shown: str) -> MalformedCall:
    return MalformedCall(f"the call cannot be read; write {shown}")


def _dense(text: str) -> str:
    return "".join(text.split())


def _lenient(text: str) -> str:
    """A pattern for `text` with any blanks and numbers."""
    return re.sub(r"\d+", r"\\d+", r"\s*".join(map(re.escape, text.split())))


def _heads(text: str) -> list[str]:
    """`text` up to the end of each of its words and marks."""
    return [text[: word.end()].strip() for word in re.finditer(_WORD, text)]


def shared_start(first: str, second: str) -> str:
    """The text with which both begin."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(letter for letter, _ in same)


def _shared_end(first: str, second: str) -> str:
    return shared_start(first[::-1], second[::-1])[::-1]


def _to_mark(text: str) -> str:
    """`text` without a last mark that is cut off, such as `</a`."""
    return re.sub(r"[<\[][^<>\[\]\s]*$", "", text)


def _from_mark(text: str) -> str:
    """`text` without a first mark that is cut off, such as `a>`."""
    return re.sub(r"^[^<>\[\]\s]*[>\]]", "", text)
