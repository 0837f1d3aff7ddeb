"""Decodes streamed tokens to whole characters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"

_CONTEXT_TOKENS = 6
_BROKEN_CONTEXT_TOKENS = 16
"""Tokens kept if the text ends inside a character: its bytes, and enough context to decode them identically."""
_WINDOW_TOKENS = 64
_LONGEST_RUN = 1024
"""Tokens of single bytes, one behind the other, that are decoded together."""


class IncrementalDecoder:
    """Decodes a growing sequence: the pieces that `feed` and `finish` return join to the text of all tokens.

    Incomplete characters are held back. Each call decodes only a window of recent tokens.

    Args:
        decode: token ids to text.
        prompt_ids: the tokens before the first; needed by tokenizers that drop a leading space.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        tail = [int(i) for i in prompt_ids[-_CONTEXT_TOKENS:]]
        before = decode(tail) if tail else ""
        if before.endswith(_REPLACEMENT):
            tail, before = [], ""
        self._window = tail
        self._emitted = len(before)
        self.held = 0
        """Trailing characters that later bytes may change."""

    def fork(self) -> IncrementalDecoder:
        """A copy that continues independently from here."""
        made = copy(self)
        made._window = [*self._window]
        return made

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make final."""
        self._window.extend(int(i) for i in token_ids)
        text = self._decode(self._window)
        # Trailing replacement characters may be an incomplete character, with those before it in a decoder by bytes.
        stable = len(text.rstrip(_REPLACEMENT))
        if len(text) - stable > _LONGEST_RUN:
            stable = len(text)  # no character is that long: bytes without a meaning
        piece = text[self._emitted : stable]
        self._emitted, self.held = max(self._emitted, stable), len(text) - stable
        if len(self._window) > _WINDOW_TOKENS:
            self._shorten(text[stable:])
        return piece

    def _shorten(self, held: str) -> None:
        """Keeps only the last tokens, provided that they decode to the same `held` text."""
        tail = self._window[-_BROKEN_CONTEXT_TOKENS if held else -_CONTEXT_TOKENS :]
        text = self._decode(tail)
        whole = text[: len(text) - len(held)]
        # A tail that begins inside a character would spoil what follows.
        if whole and text.endswith(held) and (_REPLACEMENT not in whole or len(self._window) > _LONGEST_RUN):
            self._window, self._emitted = tail, len(whole)

    def finish(self) -> str:
        """The text held back, at the end of the tokens."""
        text = self._decode(self._window) if self._window else ""
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece
