"""What environments and tools answer, and its text as the policy may read it: it cannot end its own turn, and has a
limit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.data.chat import Chat


MAX_TEXT_CHARS = 1 << 20
"""Of one result of a tool or one observation: what is longer is cut before anybody tokenizes it."""


@dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """What an environment answers to a reset or an action.

    `text`: for the policy. `reward`: of the action. `ended`: the episode takes no further action. `accepted`: False
    when no action was found in the response; nothing has happened then, and `text` says what was expected.
    """

    text: str
    reward: float = 0.0
    ended: bool = False
    accepted: bool = True


def for_policy(chat: Chat, text: str, limit: int) -> str:
    """The text without unpaired surrogates and special tokens; cut with a note when it has more than `limit` tokens, or
    MAX_TEXT_CHARS."""
    cut = len(text) >= MAX_TEXT_CHARS  # whoever sent it may have cut it already
    text = speakable(text[:MAX_TEXT_CHARS])
    # a token has at least one byte: a text that is short enough need not be tokenized to know
    if len(text.encode()) > limit:
        ids = chat.encode(text)
        if len(ids) > limit:
            whole = f"{'more than ' if cut else ''}{len(ids)}"
            text = f"{chat.decode(ids[:limit])}\n[cut: the first {limit} of {whole} tokens]"
    return chat.harmless(text)


def without(text: str, mark: str) -> str:
    """The text with a space inserted into every `mark` in it, blanks around the mark aside: what stands between two
    marks cannot write one. A mark of one character stays."""
    mark = mark.strip()
    if len(mark) < 2:
        return text
    return re.sub(f"{re.escape(mark[0])}(?={re.escape(mark[1:])})", lambda found: f"{found[0]} ", text)


def speakable(text: str) -> str:
    """The text without unpaired surrogates, which JSON and tools may contain and no tokenizer accepts."""
    return text.encode(errors="replace").decode()
