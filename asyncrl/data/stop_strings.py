"""Stop strings in text and tokens as they arrive: in servers, which send the text before them, and in rollouts, which
keep the tokens up to them. Pure.

All of it takes time linear in the response, whatever the strings are and however the response is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.data.incremental_decoder import Decode, IncrementalDecoder


class StopTable:
    """The stop strings of a request as an automaton: where in them an end of the text may be.

    Built once per request, in time linear in the strings; a character then costs a constant number of steps on average,
    whatever the strings are. A state is a beginning of a string; 0 is the empty one.

    Source: Aho and Corasick, Efficient string matching, CACM 18 (1975).
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """Of each state: that of its longest proper end that begins a string, too."""
        self.depths = [0]
        """Characters of each state: what must be held back, since it may become a stop string."""
        self.found: list[str | None] = [None]
        """The longest stop string that a state ends with."""
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
        while level:  # by depth: shorter states are complete
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
    """Finds the first stop string to be complete (the longest of those that are at once) in a text that arrives in
    pieces. What `feed` returns never needs to be taken back: an end that may become a stop string is held."""

    def __init__(self, table: StopTable) -> None:
        self._table = table
        self._state = 0
        self._held = ""
        self.found: str | None = None
        self.rest = ""
        """What the piece that completed `found` has after it."""

    def fork(self) -> StopStrings:
        """A copy that continues independently from here; it shares the table."""
        made = StopStrings(self._table)
        made._state, made._held, made.found, made.rest = self._state, self._held, self.found, self.rest
        return made

    def feed(self, piece: str) -> str:
        """The text that can be sent on; after a stop string was `found` it is complete, and the string not in it."""
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
        """What was held, when no more text comes."""
        held, self._held = self._held, ""
        return held


class StopFinder:
    """Finds the token of one response that completes a stop text, in chunks of any size.

    The text is that of the response alone, with its special tokens. A character counts once its last byte is there.
    The token that completes a stop text is part of the response, also when its own text goes on after it.
    """

    def __init__(self, table: StopTable, decoder: IncrementalDecoder) -> None:
        self._stops = StopStrings(table)
        self._decoder = decoder

    @property
    def found(self) -> str | None:
        """The stop text that is complete, of several the longest; None before."""
        return self._stops.found

    def feed(self, token_ids: Sequence[int]) -> int:
        """How many of these next tokens belong to the response: all, or those up to the one that completes a stop text.
        Once one was `found` there are no next tokens."""
        assert self.found is None, "the response has ended"
        stops, decoder = self._stops.fork(), self._decoder.fork()
        piece = decoder.feed(token_ids)
        stops.feed(piece)
        if stops.found is None and not decoder.held and "\ufffd" not in piece:
            self._stops, self._decoder = stops, decoder
            return len(token_ids)
        # Where in the chunk it is complete, and how broken characters read, only the single tokens tell.
        for count, token in enumerate(token_ids, 1):
            self._stops.feed(self._decoder.feed([token]))
            if self.found is not None:
                return count
        return len(token_ids)


class StopTexts:
    """The stop texts of a recipe: one table, which a `StopFinder` per response reads.

    Args:
        texts: at least one; none is empty.
        decode: token ids to text, special tokens included.
    """

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self.texts = tuple(texts)
        self._table = StopTable(self.texts)
        self._decode = decode

    def follow(self, prompt_ids: Sequence[int]) -> StopFinder:
        """For a response to `prompt_ids`, from its first token on."""
        return StopFinder(self._table, IncrementalDecoder(self._decode, prompt_ids))
