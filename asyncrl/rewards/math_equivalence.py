"""Whether two mathematical expressions mean the same, through the package `math-verify`: sets, intervals, tuples,
equations, roots, polynomials.

Its own timeouts need signals at both of its calls; here one alarm stands around all of it, in the main thread, which
is where reward processes work. It counts CPU time: on a busy machine the same answers get the same reward. In other
threads, and where C code does not let the alarm through, the deadline of the
process holds.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

MAX_CHARS = 400
"""Longer ones are not compared: no answer is, and parsing takes time that grows faster than the length."""
MAX_CPU_S = 5.0
"""CPU seconds that one comparison may take; then the answer counts as another one."""
_LATEX = frozenset("\\^_{}()[],;=<>!")


class _TooLong(BaseException):
    """No Exception: the packages below catch those."""


def equivalent(answer: str, truth: str) -> bool:
    """True when both parse and mean the same. False for what cannot be parsed, and what takes longer than MAX_CPU_S."""
    if max(len(answer), len(truth)) > MAX_CHARS or not (_is_mathematical(answer) and _is_mathematical(truth)):
        return False
    # takes half a second to import, and most answers are plain numbers; the limit is of the comparison alone
    import math_verify

    try:
        return _within(MAX_CPU_S, lambda: _verified(math_verify, answer, truth))
    except _TooLong:
        return False


def _is_mathematical(text: str) -> bool:
    """Whether there is anything to compute with: words compare as text."""
    return any(c.isdigit() or c in _LATEX for c in text)


def _verified(math_verify: Any, answer: str, truth: str) -> bool:
    for name in ("math_verify.parser", "math_verify.grader", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(
            logging.CRITICAL
        )  # they warn that nobody limits their time, and of each failure
    gold = math_verify.parse(_delimited(truth), parsing_timeout=0)
    if not gold:
        return False
    found = math_verify.parse(_delimited(answer), parsing_timeout=0)
    return bool(found) and bool(math_verify.verify(gold, found, timeout_seconds=0))


def _delimited(text: str) -> str:
    """As math-verify looks for it in a text: it takes LaTeX between its signs alone."""
    if "$" in text or "\\(" in text or "\\[" in text or "\\boxed" in text:
        return text
    return f"${text.strip().rstrip('.')}$" if any(c in _LATEX for c in text) else text


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
