"""Answers of environments and tools, and their text as shown to the policy: it cannot end its own turn, and its length
is limited."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.data.chat import Chat


MAX_TEXT_CHARS = 1 << 20
"""Longest result of a tool and longest observation; cut before tokenization."""


@dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """The answer of an environment to a reset or an action.

    `text`: for the policy. `reward`: of the action. `ended`: the episode takes no further action. `accepted` False: the
    response had no action, nothing has happened, and `text` says what was expected.
    """

    text: str
    reward: float = 0.0
    ended: bool = False
    accepted: bool = True


def for_policy(chat: Chat, text: str, limit: int) -> str:
    """The text without unpaired surrogates and special tokens; cut, with a note, to `limit` tokens and
    MAX_TEXT_CHARS."""
    cut = len(text) >= MAX_TEXT_CHARS  # the sender may have cut it already
    text = speakable(text[:MAX_TEXT_CHARS])
    # a token has at least one byte, so a short text need not be tokenized
    if len(text.encode()) > limit:
        ids = chat.encode(text)
        if len(ids) > limit:
            whole = f"{'more than ' if cut else ''}{len(ids)}"
            text = f"{chat.decode(ids[:limit])}\n[cut: the first {limit} of {whole} tokens]"
    return chat.harmless(text)


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
