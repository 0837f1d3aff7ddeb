"""Compares what a program printed or returned with what was expected. Pure; the program may have forged its output."""

from __future__ import annotations

import json
import math
from typing import Any

_CLOSE = {"rel_tol": 1e-6, "abs_tol": 1e-9}


def printed(stdout: str, wanted: str) -> bool:
    """Equal except for whitespace at the ends of lines and between words, blank lines, and the last digits of what
    should be a decimal."""
    left, right = ([words for line in text.split("\n") if (words := line.split())] for text in (stdout, wanted))
    return len(left) == len(right) and all(
        len(a) == len(b) and all(map(_same, a, b)) for a, b in zip(left, right, strict=True)
    )


def reported(stdout: str, mark: str) -> list[Any]:
    """The one value that the harness wrote between the last two marks, or nothing."""
    found = stdout.split(mark)
    try:
        return [json.loads(found[-2])] if len(found) > 2 else []
    except (ValueError, RecursionError):
        return []


def equal(given: Any, wanted: Any) -> bool:
    """Equal JSON values; a wanted decimal may differ in its last digits. A truth value is no number."""
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(equal, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(equal(given[key], wanted[key]) for key in wanted)
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, float):
        try:
            return math.isclose(given, wanted, **_CLOSE)
        except OverflowError:
            return False
    return given == wanted


def _same(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if not any(c in wanted for c in ".eE"):
        whole, point, decimals = given.partition(".")
        return bool(point) and whole == wanted and whole.lstrip("+-").isdecimal() and not decimals.strip("0")
    try:
        return math.isclose(float(given), float(wanted), **_CLOSE)
    except ValueError:
        return False
