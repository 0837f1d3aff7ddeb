"""Tests whether two mathematical expressions are equivalent, with the package `math-verify`: sets, intervals, tuples,
equations, roots, polynomials.

One alarm limits the whole comparison instead of the package's timeouts per call. It counts CPU time, so that rewards do
not depend on the load of the machine, and works in the main thread, which reward processes use. In other threads, or if
C code blocks the alarm, the deadline of the process applies.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any

MAX_CHARS = 400
"""Longer texts are not compared: no answer is that long, and parsing time grows superlinearly."""
MAX_CPU_S = 5.0
"""CPU seconds of a comparison, after which the answers count as different."""
_FOREIGN = re.compile(r"(?<![_\d])\d+ \d|(?<![A-Za-z}])_|\\=|\\(?:overline|[pb]?mod)(?![A-Za-z])")
"""Text that math-verify misreads as a product, a digit or nothing."""
_HOPELESS = re.compile(r"\^\{*-?\d+\}*\^|\^\{?-?\d{5}|\d{5}!|[)}]!|!!")
"""Towers of powers, huge powers and factorials, which would only run into MAX_CPU_S."""
_MAX_DEPTH = 20  # the parser's time doubles with each level
_COMMAND = re.compile(r"\\[A-Za-z]+")
_STRICT = {"float_rounding": 12, "allow_set_relation_comp": True, "timeout_seconds": 0}


class _TooLong(BaseException):
    """A BaseException, because the packages catch every Exception."""


def equivalent(answer: str, truth: str) -> bool:
    """True if both parse and are equivalent; False otherwise, and after MAX_CPU_S."""
    if max(map(len, (answer, truth))) > MAX_CHARS or max(map(_depth, (answer, truth))) > _MAX_DEPTH:
        return False
    if any(pattern.search(text) for pattern in (_FOREIGN, _HOPELESS) for text in (answer, truth)):
        return False
    letters, others = (set(_COMMAND.sub("", text)) for text in (answer, truth))
    if any(c.isalpha() and c.swapcase() in others and c not in others for c in letters):
        return False  # math-verify ignores case
    # Imported late, outside the time limit: it takes half a second, and most answers are plain numbers.
    import math_verify

    try:
        return _within(MAX_CPU_S, lambda: _verified(math_verify, answer, truth))
    except _TooLong:
        return False


def _depth(text: str) -> int:
    """Largest depth of nested brackets."""
    return max(accumulate((c in "([{") - (c in ")]}") for c in text), default=0)


def _verified(math_verify: Any, answer: str, truth: str) -> bool:
    for name in ("math_verify.parser", "math_verify.grader", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they warn about the missing timeout and each failure
    # The whole as LaTeX: the default would take the first number of 3//8, which is 3
    latex = [math_verify.LatexExtractionConfig()]
    gold = math_verify.parse(f"${truth}$", latex, parsing_timeout=0)
    found = math_verify.parse(f"${answer}$", latex, parsing_timeout=0) if gold else []
    return bool(found) and bool(math_verify.verify(gold, found, **_STRICT))


def _within(limit_s: float, work: Callable[[], bool]) -> bool:
    """Runs `work` for at most `limit_s` CPU seconds. Raises _TooLong."""
    if threading.current_thread() is not threading.main_thread():
        return work()

    def stop(number: int, frame: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
