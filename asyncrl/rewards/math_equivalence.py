"""Decides whether two mathematical expressions mean the same, with the package `math-verify`: sets, intervals, tuples,
equations, roots, polynomials.

The package has a timeout, by signal, for each of its two calls. Here one alarm limits the whole comparison, in the main
thread, where reward processes work. It counts CPU time, so that the same answers get the same reward on a busy machine.
In other threads, and where C code blocks the alarm, the deadline of the process applies.
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
"""Longer ones are not compared: no answer is, and parsing takes time that grows faster than the length."""
MAX_CPU_S = 5.0
"""CPU seconds that one comparison may take; then the answer counts as another one."""
_FOREIGN = re.compile(r"(?<![_\d])\d+ \d|(?<![A-Za-z}])_|\\=|\\(?:overline|[pb]?mod)(?![A-Za-z])")
"""What math-verify understands as something else: a product, a digit, nothing."""
_HOPELESS = re.compile(r"\^\{*-?\d+\}*\^|\^\{?-?\d{5}|\d{5}!|[)}]!|!!")
"""Towers of powers, huge powers and factorials: what would only be given up after MAX_CPU_S."""
_MAX_DEPTH = 20  # the parser's time doubles with each level
_COMMAND = re.compile(r"\\[A-Za-z]+")
_STRICT = {"float_rounding": 12, "allow_set_relation_comp": True, "timeout_seconds": 0}


class _TooLong(BaseException):
    """No Exception: the packages below catch those."""


def equivalent(answer: str, truth: str) -> bool:
    """True when both parse and mean the same. False for what cannot be parsed, and what takes longer than MAX_CPU_S."""
    if max(map(len, (answer, truth))) > MAX_CHARS or max(map(_depth, (answer, truth))) > _MAX_DEPTH:
        return False
    if any(pattern.search(text) for pattern in (_FOREIGN, _HOPELESS) for text in (answer, truth)):
        return False
    letters, others = (set(_COMMAND.sub("", text)) for text in (answer, truth))
    if any(c.isalpha() and c.swapcase() in others and c not in others for c in letters):
        return False  # math-verify takes N for n
    # takes half a second to import, and most answers are plain numbers; the limit is of the comparison alone
    import math_verify

    try:
        return _within(MAX_CPU_S, lambda: _verified(math_verify, answer, truth))
    except _TooLong:
        return False


def _depth(text: str) -> int:
    """How many brackets are open at once."""
    return max(accumulate((c in "([{") - (c in ")]}") for c in text), default=0)


def _verified(math_verify: Any, answer: str, truth: str) -> bool:
    for name in ("math_verify.parser", "math_verify.grader", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(
            logging.CRITICAL
        )  # they warn that nobody limits their time, and of each failure
    # LaTeX as a whole: by default it would take 3 for 3//8, being the first number in it
    latex = [math_verify.LatexExtractionConfig()]
    gold = math_verify.parse(f"${truth}$", latex, parsing_timeout=0)
    found = math_verify.parse(f"${answer}$", latex, parsing_timeout=0) if gold else []
    return bool(found) and bool(math_verify.verify(gold, found, **_STRICT))


def _within(limit_s: float, work: Callable[[], bool]) -> bool:
    """`limit_s` in CPU seconds of this process. Raises _TooLong."""
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
