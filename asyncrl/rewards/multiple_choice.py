r"""Reward 1 for the right letter of a multiple-choice question.

The chosen letter, in order of preference: in the last complete `\boxed{}`; after the last `Answer:`, `####` or `answer
is`; the last one in parentheses, as in (B); alone on the last line. The words "a" and "I" before another word do not
count.
"""

from __future__ import annotations

import re

from asyncrl.data.rows import PromptRow
from asyncrl.errors import explain
from asyncrl.rewards.math import final_answer
from asyncrl.rewards.reward import RewardResult

_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_LETTER = r"(?<![A-Za-z])\(?([A-Z])\)?(?![A-Za-z'])"
# "a good one", "I am not sure": a letter that is a word; "A because ..." is a choice
_NO_WORD = r"(?!(?<=[AI])[ \t]+(?!(?:because|since|as|is|and|or|for|due)\b)(?-i:[a-z]))"
_STATED = re.compile(rf"^[\s*$({{\[]*(?:(?:option|choice)\s*)?{_LETTER}{_NO_WORD}", re.IGNORECASE)
_PARENTHESES = re.compile(r"\(([A-Z])\)")
_ALONE = re.compile(r"^[\s*(]*([A-Za-z])[\s*).:]*$")


def multiple_choice_reward(response: str, row: PromptRow) -> RewardResult:
    """1 if the chosen letter is the ground truth's, else 0. Parts: `correct`, `answered` (a letter was chosen).

    Raises ValueError: the ground truth names no letter.
    """
    truth = true_letter(row)
    letter = chosen_letter(response)
    correct = float(letter == truth)
    return RewardResult(correct, (("correct", correct), ("answered", float(letter is not None))))


def true_letter(row: PromptRow) -> str:
    """The ground truth, in upper case. Raises ValueError: it names no letter."""
    truth = _stated(row.ground_truth)
    if truth is None:
        found = f"the ground truth {row.ground_truth[:60]!r} begins with no letter of a choice"
        raise ValueError(explain(f"reward multiple_choice of {row.origin}", found, "write it as B or (B)"))
    return truth


def chosen_letter(response: str) -> str | None:
    """The letter that the response commits to, in upper case; None if it states none."""
    stated = final_answer(response)
    if stated is not None and (letter := _stated(stated)):
        return letter
    if marked := _PARENTHESES.findall(response):
        return marked[-1]
    lines = response.strip().splitlines()
    alone = _ALONE.match(lines[-1]) if lines else None
    return alone[1].upper() if alone else None


def _stated(text: str) -> str | None:
    """The letter that a text begins with."""
    match = _STATED.match(_TEXT.sub(r"\1", text))
    return match[1].upper() if match else None
