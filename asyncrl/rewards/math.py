r"""Reward 1 for the right final answer, however it is written.

The final answer is the content of the last complete `\boxed{}`, else what follows the last `Answer:`, `answer is` or
`####` on its line. Numbers compare by value (integers, decimals, fractions, thousands separators; currency and percent
signs are dropped), everything else as normalised text, and where that differs by what it means (`math_equivalence`).
Source: the answer rules of DAPO (arXiv:2503.14476) and Minerva (arXiv:2206.14858, app. D), with exact rationals
instead of floats and without their lists of units.
"""

from __future__ import annotations

import re
from fractions import Fraction

from asyncrl.data.rows import PromptRow
from asyncrl.errors import explain
from asyncrl.rewards.math_equivalence import equivalent
from asyncrl.rewards.reward import RewardResult

_BOXED = r"\boxed"
_BRACE = re.compile(r"\\[{}]|[{}]")
_MARKED = re.compile(r"(?:\banswer[ \t*_]*(?::|\bis\b[ \t]*:?)|####)[ \t*]*([^\n]*)", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]+)\}|(\d))(?:\{([^{}]+)\}|(\d))")
_MIXED = re.compile(r"^([+-]?)(\d+)\\[dt]?frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))$")
_MIXED_IN_WORDS = re.compile(r"^\s*([+-]?\d+)\s+(\d+)/(\d+)(?=[.,;:\s]*$)")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_NOISE = re.compile(r"\\[!,;: ]|\\left|\\right|\\%|\\\$|[$%*`]")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:/([+-]?(?:\d+(?:\.\d*)?|\.\d+)))?")
_EXCLAIMED = re.compile(r"[A-Za-z]{2,}!+")
_ASSIGNMENT = re.compile(r"[A-Za-z]=(.+)")
_MAX_DIGITS = 200  # longer ones compare as text: no answer has them, and big integers cost time


def math_reward(response: str, row: PromptRow) -> RewardResult:
    """1 when the final answer equals the ground truth, else 0. Parts: `correct`, and `answered` (one was found)."""
    answer = final_answer(response, factorial=row.ground_truth.rstrip().endswith("!"))
    correct = float(answer is not None and same_answer(answer, row.ground_truth))
    return RewardResult(correct, (("correct", correct), ("answered", float(answer is not None))))


def check_truth(row: PromptRow) -> None:
    """Raises ValueError: nothing of the ground truth is left to compare with."""
    if not normalise(row.ground_truth):
        found = f"the ground truth {row.ground_truth[:60]!r}, of which normalisation leaves nothing"
        raise ValueError(explain(f"reward math of {row.origin}", found, "correct the row, or use reward exact"))


def final_answer(response: str, *, factorial: bool = False) -> str | None:
    """The answer that the response commits to, unnormalised; None when it states none.

    Outside of a box an exclamation mark at its end is emphasis, unless `factorial`.
    """
    boxed = _last_boxed(response)
    if boxed is not None:
        return boxed
    marked = [match.group(1).strip() for match in _MARKED.finditer(response)]
    if not marked:
        return None
    return (marked[-1] if factorial else marked[-1].rstrip("!").rstrip()) or None


def same_answer(answer: str, truth: str) -> bool:
    """True when both are the same number, the same text after normalisation, or mean the same."""
    left, right = normalise(answer), normalise(truth)
    if not left or not right:
        return False
    left_value, right_value = value_of(left), value_of(right)
    if left_value is not None and right_value is not None:
        return left_value == right_value
    return left == right or equivalent(answer, truth)


def _last_boxed(text: str) -> str | None:
    """What the last complete box holds. One pass: a policy may write any number of boxes that never close."""
    opened: list[int] = []
    last = None
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if text.endswith(_BOXED, 0, start) and (last is None or start > last[0]):
                last = (start, brace.start())
    return text[last[0] + 1 : last[1]].strip() if last else None


def normalise(answer: str) -> str:
    """The answer in the form in which answers are compared: no blanks, no signs of currency, fractions as a/b."""
    boxed = _last_boxed(answer)
    text = _MIXED_IN_WORDS.sub(r"\1\\frac{\2}{\3}", without_markup(boxed if boxed is not None else answer))
    text = _MIXED.sub(_improper, "".join(text.split()).rstrip(".,;:"))
    text = with_plain_fractions(text)
    if _EXCLAIMED.fullmatch(text):
        text = text.rstrip("!")
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    assigned = _ASSIGNMENT.fullmatch(text)
    return assigned[1] if assigned else text


def without_markup(text: str) -> str:
    """`text` without LaTeX that only sets it, and without signs of currency and percent; blanks stay."""
    return _TEXT.sub(r"\1", _NOISE.sub("", text.replace("{,}", ",")))


def with_plain_fractions(text: str) -> str:
    r"""`text` with a/b for every \frac{a}{b}."""
    return _FRACTION.sub(_quotient, text)


def _improper(mixed: re.Match[str]) -> str:
    sign, whole, *parts = mixed.groups()
    numerator, denominator = (part for part in parts if part)
    if max(map(len, (whole, numerator, denominator))) > _MAX_DIGITS:
        return mixed[0]
    return f"{sign}{int(whole) * int(denominator) + int(numerator)}/{denominator}"


def _quotient(fraction: re.Match[str]) -> str:
    """a/b for plain numbers; anything longer keeps parentheses, so that its parts stay apart."""
    above, below = fraction[1] or fraction[2], fraction[3] or fraction[4]
    return "/".join(part if _NUMBER.fullmatch(part) and "/" not in part else f"({part})" for part in (above, below))


def value_of(text: str) -> Fraction | None:
    """The number that a normalised answer is; None for anything else."""
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > _MAX_DIGITS:
        return None
    denominator = Fraction(match[2]) if match[2] else Fraction(1)
    return Fraction(match[1]) / denominator if denominator else None
