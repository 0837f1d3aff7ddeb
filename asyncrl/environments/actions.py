"""Finds the action in a response. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?![\w.]*\d)")


def last_match(response: str, pattern: str) -> str:
    """The group of the pattern's last match, or the whole response without a pattern; empty without a match."""
    if not pattern:
        return response
    found = [match.group(1) or "" for match in re.finditer(pattern, response, re.DOTALL)]
    return found[-1] if found else ""


def last_tagged(response: str, tag: str) -> str:
    """What stands between the last `</tag>` and the `<tag>` before it, or the whole response without a tag; empty when
    it does not have both."""
    if not tag:
        return response
    before = response.rpartition(f"</{tag}>")[0]
    return before.rpartition(f"<{tag}>")[2] if f"<{tag}>" in before else ""


def last_choice(text: str, start: int, number: int, names: Sequence[str]) -> int | None:
    """The last of the choices start, start + 1, ... that the text names; None when it names none.

    Args:
        number: how many choices there are.
        names: of the choices, in order, found as whole words in upper or lower case. Empty: they are whole numbers.
    """
    if names:
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE)
        places = {name.lower(): start + place for place, name in enumerate(names)}
        return places[found[-1].lower()] if found else None
    numbers = _NUMBER.findall(text)
    value = int(numbers[-1]) if numbers else None
    return value if value is not None and start <= value < start + number else None
