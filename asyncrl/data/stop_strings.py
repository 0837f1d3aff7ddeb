"""Finds stop strings in streamed text (servers, which send the text before them) and tokens (rollouts, which keep the
tokens up to them). Pure.

Linear in the response, whatever the strings and chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from asyncrl.data.incremental_decoder import Decode, IncrementalDecoder


class StopTable:
    """The stop strings of a request as an automaton over prefixes of the strings.

    Built once per request, in time linear in the strings; a character costs amortised constant time. A state is a
    prefix of a string; 0 is the empty prefix.

    Source: Aho and Corasick, Efficient string matching, CACM 18 (1975).
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """Failure link per state: its longest proper suffix that is a prefix of a string."""
        self.depths = [0]
        """Length of each state: characters to hold back, since they may become a stop string."""
        self.found: list[str | None] = [None]
        """Per state, the longest stop string that it ends with."""
        for string in strings:
            state = 0
            for depth, character in enumerate(string, 1):
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self.depths.append(depth)
                    self.found.append(None)
                state = self._next[state][character]
            self.found[state] = string
        self._shorter *= len(self._next)
        level = list(self._next[0].values())
        while level:  # breadth first: links of shorter states are complete
            for state in level:
                self.found[state] = self.found[state] or self.found[self._shorter[state]]
                for character, longer in self._next[state].items():
                    self._shorter[longer] = self.step(self._shorter[state], character)
            level = [longer for state in level for longer in self._next[state].values()]

    def step(self, state: int, character: str) -> int:
        """The state after `character`."""
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)


class StopStrings:
    """Finds the first stop string to complete (the longest, if several do) in streamed text. Text that may become a
    stop string is held back, so the result of `feed` is final."""

    def __init__(self, table: StopTable) -> None:
        self._table = table
        self._state = 0
        self._held = ""
        self.found: str | None = None
        self.rest = ""
        """Text of the last piece after `found`."""

    def fork(self) -> StopStrings:
        """A copy that continues independently from here; it shares the table."""
        return copy(self)

    def feed(self, piece: str) -> str:
        """The text that is final; once a stop string is `found`, everything before it."""
        table, state = self._table, self._state
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            state = table.step(state, character)
            if (found := table.found[state]) is not None:
                self._held, self.found, self.rest = "", found, text[end:]
                return text[: end - len(found)]
        self._state = state
        certain = len(text) - table.depths[state]
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class StopFinder:
    """Finds the token of a response that completes a stop text, in chunks of any size.

    Searches the response's text, special tokens included; a character counts once complete. The token that completes a
    stop text belongs to the response, even if its text continues after it.
    """

    def __init__(self, table: StopTable, decoder: IncrementalDecoder) -> None:
        self._stops = StopStrings(table)
        self._decoder = decoder

    @property
    def found(self) -> str | None:
        """The completed stop text (the longest of several), or None."""
        return self._stops.found

    def feed(self, token_ids: Sequence[int]) -> int:
        """The number of these tokens that belong to the response: all, or up to the one that completes a stop text. Not
        to be called after `found`."""
        assert self.found is None, "the response has ended"
        # Try the whole chunk on copies: most chunks complete nothing.
        stops, decoder = self._stops.fork(), self._decoder.fork()
        piece = decoder.feed(token_ids)
        stops.feed(piece)
        if stops.found is None and not decoder.held and "\ufffd" not in piece:
            self._stops, self._decoder = stops, decoder
            return len(token_ids)
        # Only single tokens show where in the chunk it completes, and how incomplete characters decode.
        for count, token in enumerate(token_ids, 1):
            self._stops.feed(self._decoder.feed([token]))
            if self.found is not None:
                return count
        return len(token_ids)


class StopTexts:
    """The stop texts of a recipe: one table, shared by a `StopFinder` per response.

    Args:
        texts: at least one; none is empty.
        decode: token ids to text, special tokens included.
    """

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self.texts = tuple(texts)
        self._table = StopTable(self.texts)
        self._decode = decode

    def follow(self, prompt_ids: Sequence[int]) -> StopFinder:
        """A finder for a response to `prompt_ids`, from its first token."""
        return StopFinder(self._table, IncrementalDecoder(self._decode, prompt_ids))
