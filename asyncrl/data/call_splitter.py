"""Splits the streamed text of a reply into thoughts, text and tool calls. Pure.

Thoughts stand at the start of a reply, between the template's marks. A call is found by its tags and parsed once
complete (`tool_calls`); a malformed call stays text. The parts do not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from asyncrl.data.rows import Thinking
from asyncrl.data.stop_strings import StopStrings, StopTable
from asyncrl.data.tool_calls import PARSERS, CallParser, ToolCall, ToolSignature, call_tags, shown


class Thought(str):
    """A piece of a thought, without its marks."""

    __slots__ = ()


Part = str | ToolCall
"""A piece of text or of a thought, or a complete call."""

_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of calls and the existing tools; shared by all replies to a request.

    Attributes:
        single: the reply ends with its first call.
        tags: as `call_tags`; empty for `json`, where a whole reply is calls or text.
        marks: texts with the tags and what else calls are written with.
        openings: finds the opening tags.
    """

    parser: CallParser
    tools: tuple[ToolSignature, ...]
    single: bool = False
    tags: dict[str, str] = field(init=False, repr=False, compare=False)
    marks: tuple[str, ...] = field(init=False, repr=False, compare=False)
    openings: StopTable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tags = call_tags(self.parser, self.tools)
        object.__setattr__(self, "tags", tags)
        object.__setattr__(self, "marks", (*tags, *tags.values(), shown(self.parser)))
        object.__setattr__(self, "openings", StopTable(list(tags)))


class CallSplitter:
    """Splits one reply. Blanks around calls are dropped, and at the end of a reply with calls."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._parse = PARSERS[form.parser]
        self._text: StopStrings | None = StopStrings(form.openings)
        self._call: StopStrings | None = None
        self._body: list[str] = []
        """The call in progress, with its opening tag; for JSON, the whole reply."""
        self._begins = form.parser == "json"
        """True while the reply may still become JSON."""
        self._head = ""
        """Start of the reply, without leading blanks, while `_begins`."""
        self._is_json = False
        self._blanks: list[str] = []
        """Trailing blanks, held until the next part is known. Empty directly after a call."""
        self._after_call = False
        self.num_calls = 0

    @property
    def done(self) -> bool:
        """True after the only call of a `single` reply; further text is dropped."""
        return self._form.single and self.num_calls > 0

    def feed(self, piece: str) -> tuple[Part, ...]:
        """The parts that have become final."""
        parts: list[Part] = []
        if self._begins or self._is_json:
            piece = self._json_begins(piece)
        while piece and not self.done:
            # Inside a call: collect until its closing tag. Outside: text until an opening tag.
            if self._call is not None:
                self._body.append(self._call.feed(piece))
                if self._call.found is None:
                    break
                piece = self._call.rest
                self._end_call(self._call.found, parts)
            else:
                assert self._text is not None
                self._say(self._text.feed(piece), parts)
                if (found := self._text.found) is None:
                    break
                piece = self._text.rest
                closing = self._form.tags[found]
                self._body, self._call = [found], StopStrings(StopTable([closing] if closing else []))
        return joined_parts(parts)

    def finish(self) -> tuple[Part, ...]:
        """The rest at the end of the reply. An unclosed call is text, unless the format allows it."""
        parts: list[Part] = []
        if self.done:
            return ()
        if self._begins or self._is_json:
            self._end_call("", parts)
        elif self._call is not None:
            self._end_call(self._call.finish(), parts)
        elif self._text is not None:
            self._say(self._text.finish(), parts)
        if self.num_calls == 0:
            parts.extend(self._blanks)
        return joined_parts(parts)

    def _say(self, text: str, parts: list[Part]) -> None:
        if self._after_call:
            text = text.lstrip()
        end = len(text.rstrip())
        if end:
            parts += [*self._blanks, text[:end]]
            self._blanks, self._after_call = [], False
        if text[end:]:
            self._blanks.append(text[end:])

    def _end_call(self, end: str, parts: list[Part]) -> None:
        """Adds the calls of the body; its text, if one of them is malformed or there are none."""
        text = "".join(self._body) + end
        self._body, self._call, self._text = [], None, StopStrings(self._form.openings)
        calls = self._parse(text, self._form.tools)
        made = [call for call in calls if isinstance(call, ToolCall)]
        if not made or len(made) < len(calls):
            self._say(text, parts)
            return
        kept = made[:1] if self._form.single else made
        self._blanks, self._after_call = [], True
        self.num_calls += len(kept)
        parts.extend(kept)

    def _json_begins(self, piece: str) -> str:
        """The part of `piece` that is final text: empty while the reply is, or may become, JSON."""
        self._body.append(piece)
        if self._is_json:
            return ""
        head = self._head = (self._head + piece).lstrip()
        self._is_json = head.startswith(("{", _PYTHON_TAG))
        if self._is_json or _PYTHON_TAG.startswith(head):
            return ""
        self._begins = False
        said, self._body = "".join(self._body), []
        return said


class ReplySplitter:
    """Splits one reply. Blanks before a thought, and after its marks, are dropped.

    Args:
        marks: of thoughts; None: thoughts are text.
        form: None: the reply calls no tools.
    """

    def __init__(self, marks: Thinking | None, form: CallFormat | None) -> None:
        self._marks = marks or Thinking()
        self._calls = None if form is None else CallSplitter(form)
        self._closings = StopTable([self._marks.closing])
        self._head = None if marks is None else ""
        """Blanks and the start of what may be an opening mark; None: inside a thought, or behind all of them."""
        self._thought: StopStrings | None = None
        self._is_behind = False
        """Leading blanks are dropped: a mark came last."""
        if self._marks.begun:
            self._open()

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def done(self) -> bool:
        """True after the only call of a `single` reply; further text is dropped."""
        return self._calls is not None and self._calls.done

    def feed(self, piece: str) -> tuple[Part, ...]:
        """The parts that have become final."""
        parts: list[Part] = []
        while piece:
            if self._thought is not None:
                self._think(self._thought.feed(piece), parts)
                if self._thought.found is None:
                    break
                piece = self._thought.rest
                self._thought, self._head, self._is_behind = None, "", True
            elif self._head is not None:
                head = self._head + piece
                begun = head.lstrip()
                if begun.startswith(self._marks.opening):
                    piece = begun.removeprefix(self._marks.opening)
                    self._open()
                elif self._marks.opening.startswith(begun):
                    self._head = head
                    break
                else:
                    self._head, piece = None, begun if self._is_behind else head
            else:
                self._say(piece, parts)
                break
        return joined_parts(parts)

    def finish(self) -> tuple[Part, ...]:
        """The rest at the end of the reply."""
        parts: list[Part] = []
        if self._thought is not None:
            self._think(self._thought.finish(), parts)
        elif head := (self._head or "").lstrip() if self._is_behind else self._head:
            self._say(head, parts)
        return joined_parts([*parts, *(() if self._calls is None else self._calls.finish())])

    def _open(self) -> None:
        self._thought, self._head, self._is_behind = StopStrings(self._closings), None, True

    def _think(self, text: str, parts: list[Part]) -> None:
        if text := text.lstrip() if self._is_behind else text:
            parts.append(Thought(text))
            self._is_behind = False

    def _say(self, text: str, parts: list[Part]) -> None:
        parts += [text] if self._calls is None else self._calls.feed(text)


def joined_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Joins neighbouring pieces of text, and of thoughts."""
    made: list[Part] = []
    for kind, run in groupby(parts, type):
        if kind is ToolCall:
            made.extend(run)
        elif text := "".join(part for part in run if isinstance(part, str)):
            made.append(kind(text))
    return tuple(made)


def text_in(parts: Iterable[object]) -> str:
    """The text without thoughts and calls."""
    return "".join(part for part in parts if isinstance(part, str) and not isinstance(part, Thought))


def thought_in(parts: Iterable[object]) -> str:
    return "".join(part for part in parts if isinstance(part, Thought))
