"""Reward 1 for a number that is close enough."""

from __future__ import annotations

import re

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.errors import explain
from asyncrl.rewards.math import final_answer
from asyncrl.rewards.reward import RewardResult

_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)\.\d*|\.\d+)?(?<=[\d.])(?:[eE][+-]?\d+)?")
_MAX_DIGITS = 400


class NumericReward:
    """The number is the last one of the final answer as reward math finds it, or, when the response marks none, the
    last one of all. `reward.tolerance` is relative to the ground truth; where that is 0, absolute."""

    def __init__(self, config: RewardConfig) -> None:
        self._tolerance = config.tolerance

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        """1 when the number is right, else 0. Parts: `correct`, and `answered` (there was one).

        Raises ValueError: the ground truth is no number.
        """
        truth = last_number(row.ground_truth)
        if truth is None:
            found = f"the ground truth {row.ground_truth[:60]!r} is no number"
            raise ValueError(explain(f"reward numeric of {row.origin}", found, "correct the row, or use reward math"))
        stated = final_answer(response)
        number = last_number(response if stated is None else stated)
        correct = float(number is not None and abs(number - truth) <= self._tolerance * (abs(truth) or 1.0))
        return RewardResult(correct, (("correct", correct), ("answered", float(number is not None))))


def last_number(text: str) -> float | None:
    """The last decimal number of a text, with thousands separators, an exponent or a fraction `a/b`."""
    found = [match for match in _NUMBER.finditer(text) if any(c.isdigit() for c in match[0])]
    if not found or len(found[-1][0]) > _MAX_DIGITS:
        return None
    value = float(found[-1][0].replace(",", ""))
    if len(found) > 1 and text[found[-2].end() : found[-1].start()].strip() == "/" and value:
        return float(found[-2][0].replace(",", "")) / value
    return value
