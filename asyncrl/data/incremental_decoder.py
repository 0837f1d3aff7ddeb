"""Text from tokens as they arrive: whole characters only. Pure."""

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
