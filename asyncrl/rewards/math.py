r"""Reward 1 for the right final answer, in any notation.

The final answer, after the last `</think>`, is the content of the last complete `\boxed{}`, else the text after the
last `Answer:`, `answer is`, `####`, `<answer>` or heading `Answer`, on its line or the next non-blank one. The answer
is chosen without looking at the truth, so guessing several never pays. Numbers compare by value, words without case,
everything else by meaning: the package `math-verify` compares sets, intervals, tuples, equations, roots, polynomials.

One alarm limits the whole comparison instead of the package's timeouts per call. It counts CPU time, so that rewards do
not depend on the load of the machine, and works in the main thread, which reward processes use. In other threads, or if
C code blocks the alarm, the deadline of the process applies.

Source: the answer rules of DAPO (arXiv:2503.14476) and Minerva (arXiv:2206.14858, app. D), with exact rationals
instead of floats and without their lists of units. `tests/data/math_answers.jsonl` compares it with others.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate
from typing import Any

from asyncrl.data.rows import PromptRow
from asyncrl.errors import explain
from asyncrl.rewards.math_reading import Reading, boxed, read
from asyncrl.rewards.math_statement import states
from asyncrl.rewards.reward import RewardResult

_MARK = re.compile(
    r"(?:\banswer[ \t*_]*(?:[:=]|\bis\b[ \t]*:?)|^[ \t>]*[#*_][#*_ \t]*(?:the )?(?:final )?answer[ \t*_]*$"
    r"|####|<answer>)",
    re.IGNORECASE | re.MULTILINE,
)
_LINE = re.compile(r"[\s*_]*((?:\\\[.*?\\\]|\$\$.*?\$\$|)[^\n]*(?:\n\s*or\b[^\n]*)*)", re.DOTALL)
_WORDS = re.compile(r"\(?([A-Za-z][A-Za-z '-]*)\)?(?:(?<=[A-Za-z]{2})!+)?")
_CHOICE = re.compile(r"(?:(?i:option|choice) ?)?(?:\(([A-Z])\)|([A-Z])(?=$|[):]|\.(?!\d)))[):.]*(.*)", re.DOTALL)
_LONE_LETTER = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])")
_TIME = re.compile(r"\d:\d\d(?!\d)")
_EQUALS = re.compile(r"(?<![<>!\\:=]):?=+|\\equiv(?![A-Za-z])")
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq)(?![A-Za-z])")
_NAME = re.compile(
    r"(?:\\(?!pi(?![a-z]))[A-Za-z]+ ?[A-Z]{0,3}|[A-Za-z]{1,3})'?(?:_(?:\w|\{[^{}]*\}))?(?:\([\w,]*\))?"
    r"|\([A-Za-z](?:,[A-Za-z])*\)"
)
_MAX_SIDES = 3  # comparing by meaning is slow


def math_reward(response: str, row: PromptRow) -> RewardResult:
    """1 if the final answer states the ground truth, else 0. Parts: `correct`, `answered` (an answer was found)."""
    answer = final_answer(response, factorial=row.ground_truth.rstrip().endswith("!"))
    is_right = answer is not None and same_answer(answer, row.ground_truth) and is_stated(answer, row)
    correct = float(is_right)
    return RewardResult(correct, (("correct", correct), ("answered", float(answer is not None))))


def check_truth(row: PromptRow) -> None:
    """Raises ValueError: normalisation leaves nothing of the ground truth."""
    if not read(row.ground_truth).text:
        found = f"the ground truth {row.ground_truth[:60]!r}, of which normalisation leaves nothing"
        raise ValueError(explain(f"reward math of {row.origin}", found, "correct the row, or use reward exact"))


def asks_for_mark(row: PromptRow) -> bool:
    """True if the prompt shows how to mark the final answer."""
    return any(r"\boxed" in message.content or _MARK.search(message.content) for message in row.messages)


def final_answer(response: str, *, factorial: bool = False) -> str | None:
    """The answer that the response commits to, verbatim; None if it states none.

    Outside a box a final exclamation mark is emphasis, unless `factorial`.
    """
    if (held := boxed(response)) is not None:
        return held
    marks = [mark.end() for mark in _MARK.finditer(response)]
    line = _LINE.match(response, marks[-1]) if marks else None
    answer = line[1].partition("</answer>")[0].strip() if line else ""
    return (answer if factorial else answer.rstrip("!").rstrip()) or None


def same_answer(answer: str, truth: str) -> bool:
    """True when both are the same number, the same words, or mean the same."""
    return _same(read(answer), read(truth))


def is_stated(answer: str, row: PromptRow) -> bool:
    """True if an answer that equals the ground truth, or one side of `x = a = b`, is more than the question."""
    found, truth = read(answer), read(row.ground_truth)
    choice = _CHOICE.fullmatch(found.text)
    if found.text == truth.text or _WORDS.fullmatch(truth.text):
        return True
    core = read(choice[3]).core if choice and choice[1] and choice[3] else found.core
    wanted = values(truth.core)[-1]
    return any(states(value, wanted, question_of(row)) for value in values(core))


def question_of(row: PromptRow) -> str:
    """The texts of the prompt."""
    return "\n".join(message.content for message in row.messages)


def values(core: str) -> list[str]:
    """The sides of `x = a = b` without names; the whole if it is no equality."""
    return _sides(core)[1] or [core]


def _same(answer: Reading, truth: Reading) -> bool:
    if not answer.text or not truth.text:
        return False
    if answer.text == truth.text or _same_words(answer.text, truth.text):
        return True
    # A choice: its letter counts, or the answer after its label.
    choice = _CHOICE.fullmatch(answer.text)
    if choice and not _LONE_LETTER.search(choice[3]):
        letter = _WORDS.fullmatch(truth.text)
        if letter and letter[1] == (choice[1] or choice[2]):
            return True
        if choice[1] and choice[3]:  # a label, then the answer
            return _same(read(choice[3]), truth)
    if not answer.core or not truth.core or not _same_unit(answer.unit, truth.unit):
        return False
    if answer.number is not None and truth.number is not None:
        return _same_number(answer.number, answer.is_percent, truth.number, truth.is_percent)
    is_time = _TIME.search(answer.core) or _TIME.search(truth.core)  # otherwise a colon is a division
    return answer.core == truth.core or (not is_time and _same_core(answer, truth))


def _same_words(answer: str, truth: str) -> bool:
    left, right = _WORDS.fullmatch(answer), _WORDS.fullmatch(truth)
    return left is not None and right is not None and left[1].casefold() == right[1].casefold()


def _same_unit(answer: str, truth: str) -> bool:
    """Equal, missing, or abbreviated (m, meter). Nothing is converted."""
    short, long = sorted((answer, truth), key=len)
    rest = iter(long)
    return short in ("", long) or (
        len(short) <= 3 < len(long) and short[0] == long[0] and all(c in rest for c in short)
    )


def _same_number(answer: Fraction, answer_is_percent: bool, truth: Fraction, truth_is_percent: bool) -> bool:
    """p% equals p / 100, and p itself if |p| >= 1: 50% is 0.5 and 50, but 0.5% is not 0.5."""
    if answer_is_percent == truth_is_percent:
        return answer == truth
    percent, plain = (answer, truth) if answer_is_percent else (truth, answer)
    return percent / 100 == plain or (percent == plain and abs(percent) >= 1)


def _same_core(answer: Reading, truth: Reading) -> bool:
    """In `x = a = b` each side must equal the truth, in `a \\approx b` the first; a leading name is ignored."""
    left, right = (one.core if one.number is None else str(one.number) for one in (answer, truth))
    if answer.integer and truth.integer:
        left = re.sub(rf"(?<![A-Za-z]){answer.integer}(?![A-Za-z])", truth.integer, left)
    (names, sides), (true_names, true_sides) = _sides(left), _sides(right)
    # The answer is a chain and the truth a value; then the reverse; then two definitions of one name.
    if true_sides == [right] and sides != [left]:
        return 1 <= len(sides) <= _MAX_SIDES and all(_same(read(side), truth) for side in sides)
    if len(true_sides) == 1 and sides == [left] and true_sides != [right]:
        return _same(answer, read(true_sides[0]))
    if len(sides) == len(true_sides) == 1 and names and names == true_names:
        return _same(read(sides[0]), read(true_sides[0]))
    return (len(names) + len(sides) > 1) == (len(true_names) + len(true_sides) > 1) and equivalent(left, right)


def _sides(core: str) -> tuple[list[str], list[str]]:
    """(names, values) of a chain of equalities; values only if it is none; both empty if it is false."""
    exact, *rounded = _APPROXIMATELY.split(core)
    if rounded:
        if _NAME.fullmatch(exact):
            return [exact], rounded
        first, last = read(_EQUALS.split(exact)[-1]).number, read(rounded[-1]).number
        if first is not None and last is not None and abs(first - last) > abs(first) / 20:
            return [], []
    sides = _EQUALS.split(exact)
    if len(sides) == 1 or (len(sides) > 2 and ("," in core or ";" in core)):
        return [], [exact]
    names = [side for side in sides if _NAME.fullmatch(side)]
    return names, [side for side in sides if side not in names] or sides[-1:]


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
