"""Text from tokens as they arrive: whole characters only, and nothing of a stop string. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"
_UNSTABLE_CHARACTERS = 3
"""A character has at most four bytes, so that an unfinished one shows as at most three replacement characters."""

_CONTEXT_TOKENS = 6
_WINDOW_TOKENS = 64


class IncrementalDecoder:
    """Decodes a growing sequence: the pieces that `feed` and `finish` return join to the text of all tokens.

    A character whose last bytes are still to come is held back. Only a window of recent tokens is decoded each time.

    Args:
        decode: token ids to text.
        prompt_ids: what stands before the first token; tokenizers that drop a leading space need to see it.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        tail = [int(i) for i in prompt_ids[-_CONTEXT_TOKENS:]]
        before = decode(tail) if tail else ""
        if before.endswith(_REPLACEMENT):
            tail, before = [], ""
        self._window = tail
        self._emitted = len(before)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain with these tokens."""
        self._window.extend(int(i) for i in token_ids)
        text = self._decode(self._window)
        stable = len(text)
        while stable > len(text) - _UNSTABLE_CHARACTERS and text[:stable].endswith(_REPLACEMENT):
            stable -= 1
        piece = text[self._emitted : stable]
        self._emitted = max(self._emitted, stable)
        if stable == len(text) and len(self._window) > _WINDOW_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._emitted = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """What was held back: nothing more will complete it."""
        text = self._decode(self._window) if self._window else ""
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces. What `feed` returns never needs to be taken back:
    an end that may become a stop string is held."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """The text that can be sent on; after a stop string was `found` it is complete, and the string not in it."""
        if not self._strings:
            return piece
        text = self._held + piece
        first = min(((at, s) for s in self._strings if (at := text.find(s)) >= 0), default=None, key=lambda hit: hit[0])
        if first is not None:
            self._held, self.found = "", first[1]
            return text[: first[0]]
        keep = max(_overlap(text, s) for s in self._strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
