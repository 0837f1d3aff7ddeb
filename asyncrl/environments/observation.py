"""Answers of environments and tools, and their text as shown to the policy: it cannot end its own turn, and its length
is limited."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.data.rows import without_marks

if TYPE_CHECKING:
    from asyncrl.data.chat import Chat
    from asyncrl.data.images import Shown


MAX_TEXT_CHARS = 1 << 20
"""Longest result of a tool and longest observation; cut before tokenization."""


@dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """The answer of an environment to a reset or an action.

    `text`: for the policy, perhaps with images. `reward`: of the action. `ended`: the episode takes no further action.
    `accepted` False: the response had no action, nothing has happened, and `text` says what was expected.
    """

    text: Shown
    reward: float = 0.0
    ended: bool = False
    accepted: bool = True


def for_policy(chat: Chat, shown: Shown, limit: int) -> str:
    """The text without unpaired surrogates and special tokens; cut, with a note, to `limit` tokens and MAX_TEXT_CHARS.
    Images, which do not count, as messages hold them; `[image]` if the model reads none."""
    parts = [shown] if isinstance(shown, str) else list(shown)
    said, left, chars = "", limit, MAX_TEXT_CHARS
    for is_image, group in itertools.groupby(parts, lambda part: isinstance(part, bytes)):
        if is_image:
            said += "".join(chat.image(part) if chat.sees_images else "[image]" for part in group)
        elif left >= 0:  # texts are cut once
            text = "".join(map(str, group))
            own, left = _cut(chat, text[:chars], left, counts=len(parts) > 1)
            chars, said = max(0, chars - len(text)), said + own
    return said


def _cut(chat: Chat, text: str, limit: int, *, counts: bool) -> tuple[str, int]:
    """The text, and how many tokens may follow; -1: it was cut. `counts`: others follow."""
    cut = len(text) >= MAX_TEXT_CHARS  # the sender may have cut it already
    text = without_marks(speakable(text))
    # a token has at least one byte, so a short text need not be tokenized
    if counts or len(text.encode()) > limit:
        ids = chat.encode(text)
        if len(ids) > limit:
            whole = f"{'more than ' if cut else ''}{len(ids)}"
            note = f"[cut: the first {limit} of {whole} tokens]"
            return chat.harmless(f"{chat.decode_turn(ids[:limit])}\n{note}"), -1
        limit -= len(ids)
    return chat.harmless(text), limit


def without(text: str, mark: str) -> str:
    """The text with a space inside every (stripped) `mark`, so that text between two marks cannot contain the mark. A
    mark of one character stays."""
    mark = mark.strip()
    if len(mark) < 2:
        return text
    return re.sub(f"{re.escape(mark[0])}(?={re.escape(mark[1:])})", lambda found: f"{found[0]} ", text)


def speakable(text: str) -> str:
    """The text without unpaired surrogates, which JSON and tools may contain and no tokenizer accepts."""
    return text.encode(errors="replace").decode()


# Extraction of the action from a response.


_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w.]*\d)")


def last_match(response: str, pattern: str) -> str:
    """The group of the pattern's last match; the whole response if there is no pattern; empty without a match."""
    if not pattern:
        return response
    found = [match.group(1) or "" for match in re.finditer(pattern, response, re.DOTALL)]
    return found[-1] if found else ""


def last_tagged(response: str, tag: str) -> str:
    """The text between the last `</tag>` and the `<tag>` before it; the whole response if `tag` is empty; empty if
    either is missing."""
    if not tag:
        return response
    before = response.rpartition(f"</{tag}>")[0]
    return before.rpartition(f"<{tag}>")[2] if f"<{tag}>" in before else ""


def last_choice(text: str, start: int, number: int, names: Sequence[str]) -> int | None:
    """The last of the choices start, start + 1, ... named in the text; None if there is none.

    Args:
        number: of choices.
        names: of the choices, in order, matched as whole words in any case. Empty: the choices are whole numbers.
    """
    if names:
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE)
        places = {name.lower(): start + place for place, name in enumerate(names)}
        return places[found[-1].lower()] if found else None
    numbers = _NUMBER.findall(text)
    value = int(numbers[-1]) if numbers else None
    return value if value is not None and start <= value < start + number else None
