r"""Reward 1 for the right final answer, however it is written.

The final answer is the content of the last complete `\boxed{}`, else what follows the last `Answer:` or `####` on its
line. Numbers compare by value (integers, decimals, fractions, thousands separators; currency and percent signs are
dropped), everything else as normalised text.
Source: the answer rules of DAPO (arXiv:2503.14476) and Minerva (arXiv:2206.14858, app. D), with exact rationals
instead of floats and without their lists of units.
"""

from __future__ import annotations

import re
from fractions import Fraction

from asyncrl.data.rows import PromptRow
from asyncrl.rewards.reward import RewardResult

_BOXED = r"\boxed"
_MARKED = re.compile(r"(?:\banswer\W*?:|####)[ \t*]*([^\n]*)", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]+)\}|(\d))(?:\{([^{}]+)\}|(\d))")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_NOISE = re.compile(r"\\[!,;: ]|\\left|\\right|\\%|\\\$|[$%*`]")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:/([+-]?(?:\d+(?:\.\d*)?|\.\d+)))?")
_ASSIGNMENT = re.compile(r"[A-Za-z]=(.+)")
_MAX_DIGITS = 200  # longer ones compare as text: no answer has them, and big integers cost time


def math_reward(response: str, row: PromptRow) -> RewardResult:
    """1 when the final answer equals the ground truth, else 0. Parts: `correct`, and `answered` (one was found)."""
    answer = final_answer(response)
    correct = float(answer is not None and same_answer(answer, row.ground_truth))
    return RewardResult(correct, (("correct", correct), ("answered", float(answer is not None))))


def final_answer(response: str) -> str | None:
    """The answer that the response commits to, unnormalised; None when it states none."""
    boxed = _last_boxed(response)
    if boxed is not None:
        return boxed
    marked = [match.group(1).strip() for match in _MARKED.finditer(response)]
    return marked[-1] or None if marked else None


def same_answer(answer: str, truth: str) -> bool:
    """True when both are the same number, or the same text after normalisation."""
    left, right = _normalise(answer), _normalise(truth)
    if not left or not right:
        return False
    left_value, right_value = _value(left), _value(right)
    if left_value is not None and right_value is not None:
        return left_value == right_value
    return left == right


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    while start >= 0:
        content = _braced(text, start + len(_BOXED))
        if content is not None:
            return content
        start = text.rfind(_BOXED, 0, start)
    return None


def _braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and its partner; None when either is missing."""
    if not text.startswith("{", start):
        return None
    depth = 0
    for at in range(start, len(text)):
        if text[at] in "{}" and text[at - 1] != "\\":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[start + 1 : at].strip()
    return None


def _normalise(answer: str) -> str:
    boxed = _last_boxed(answer)
    text = _TEXT.sub(r"\1", _NOISE.sub("", boxed if boxed is not None else answer))
    text = _FRACTION.sub(lambda m: f"({m[1] or m[2]})/({m[3] or m[4]})", text)
    text = re.sub(r"\((\d+)\)", r"\1", "".join(text.split()).rstrip(".,;:!"))
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    assigned = _ASSIGNMENT.fullmatch(text)
    return assigned[1] if assigned else text


def _value(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > _MAX_DIGITS:
        return None
    denominator = Fraction(match[2]) if match[2] else Fraction(1)
    return Fraction(match[1]) / denominator if denominator else None
