"""Reward 1 for a number within a tolerance of the ground truth."""

from __future__ import annotations

import math
import re
import sys

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.errors import explain
from asyncrl.rewards.math import final_answer, question_of, values
from asyncrl.rewards.math_reading import read, with_exponents, with_plain_fractions, without_markup
from asyncrl.rewards.math_statement import leaves_arithmetic, repeats
from asyncrl.rewards.reward import RewardResult

_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)\.\d*|\.\d+)?(?<=[\d.])(?:[eE][+-]?\d+)?")
_MAX_DIGITS = 400
_LARGEST = sys.float_info.max
_POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z])\^(?:\{[+-]?\d+\}|[+-]?\d)|\^\{?\\circ\}?")
_COMPUTED = re.compile(r"\\(?:[dt]?frac|sqrt|pi|log|ln|exp|sin|cos|tan|binom|infty|times|cdot|pm)(?![A-Za-z])|\^|\d!")


class NumericReward:
    """The number is that of the final answer (as for reward math), else the last one in it; without a marked answer,
    the last number of the response. `reward.tolerance` is relative to the ground truth, or absolute if that is 0."""

    def __init__(self, config: RewardConfig) -> None:
        self._tolerance = config.tolerance

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        """1 if the number is right, else 0. Parts: `correct`, `answered` (there was a number).

        Raises ValueError: the ground truth is no number.
        """
        truth = true_number(row)
        stated = final_answer(response)
        number = last_number(_plain(response)) if stated is None else stated_number(stated)
        if stated is not None and not _is_stated(stated, row):
            number = None
        correct = float(number is not None and abs(number - truth) <= self._tolerance * (abs(truth) or 1.0))
        return RewardResult(correct, (("correct", correct), ("answered", float(number is not None))))


def true_number(row: PromptRow) -> float:
    """The ground truth. Raises ValueError: it is no number."""
    truth = stated_number(row.ground_truth)
    if truth is None:
        found = f"the ground truth {row.ground_truth[:60]!r} is no number"
        raise ValueError(explain(f"reward numeric of {row.origin}", found, "correct the row, or use reward math"))
    return truth


def stated_number(text: str) -> float | None:
    """The number that a short text states, in words or LaTeX; None if it would have to be computed."""
    value = read(text).number
    if value is not None:
        return float(value) if abs(value) < _LARGEST else None
    plain = _plain(text)
    return None if _COMPUTED.search(plain) else last_number(plain)


def _is_stated(text: str, row: PromptRow) -> bool:
    """False: the text would have to be computed, or is an expression of the question."""
    return any(
        not leaves_arithmetic(value) and not repeats(value, row.ground_truth, question_of(row))
        for value in values(read(text).core or text)
    )


def last_number(text: str) -> float | None:
    """The last decimal number of a text, with thousands separators, an exponent or a fraction `a/b`."""
    found = [match for match in _NUMBER.finditer(text) if any(c.isdigit() for c in match[0])]
    if not found or len(found[-1][0]) > _MAX_DIGITS:
        return None
    value = float(found[-1][0].replace(",", ""))
    if len(found) > 1 and text[found[-2].end() : found[-1].start()].strip() == "/" and value:
        value = float(found[-2][0].replace(",", "")) / value
    return value if math.isfinite(value) else None


def _plain(text: str) -> str:
    """`text` with fractions as a/b, powers of ten as exponents, and without powers of units."""
    return _POWER_OF_UNIT.sub("", without_markup(with_plain_fractions(with_exponents(text))))
