"""Text as it arrives, and nothing of a stop string. Pure."""

from __future__ import annotations

from collections.abc import Sequence


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

    def feed(self, piece: str) -> str:
        """The text that can be sent on; after a stop string was `found` it is complete, and the string not in it."""
        table, state = self._table, self._state
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            state = table.step(state, character)
            if (found := table.found[state]) is not None:
                self._held, self.found = "", found
                return text[: end - len(found)]
        self._state = state
        certain = len(text) - table.depths[state]
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held, when no more text comes."""
        held, self._held = self._held, ""
        return held
