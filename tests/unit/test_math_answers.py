"""Reward math against a table of answers that a human judged, beside math-verify and DAPO's scorer."""

from collections import Counter
from pathlib import Path

import pytest

from tools.judge_answers import asyncrl, dapo, math_verify, read_answers

ANSWERS = read_answers()
BY_NAME = [pytest.param(row, id=row["name"]) for row in ANSWERS]


def test_the_table_is_whole() -> None:
    assert [name for name, times in Counter(row["name"] for row in ANSWERS).items() if times > 1] == []
    assert len(ANSWERS) >= 400
    assert 0.3 < sum(row["human"] for row in ANSWERS) / len(ANSWERS) < 0.7


@pytest.mark.parametrize("row", BY_NAME)
def test_reward_math_judges_as_the_human(row: dict) -> None:
    """Where it does not, the row says why; and it is never right for an answer that the human calls wrong."""
    judgement = asyncrl(row["response"], row["truth"])
    assert judgement == row["asyncrl"]
    assert row["human"] or not judgement
    assert (judgement != row["human"]) == bool(row.get("why"))


def test_the_judgements_of_dapo_are_those_of_its_rule() -> None:
    assert [row["name"] for row in ANSWERS if dapo(row["response"], row["truth"]) != row["dapo"]] == []


def test_the_judgements_of_math_verify_are_its_own() -> None:
    """But of what it computes until its time is up."""
    quick = [row for row in ANSWERS if not row["name"].startswith("huge")]
    judged = {row["name"]: math_verify(row["response"], row["truth"], timeout_s=60) for row in quick}
    assert [row["name"] for row in quick if judged[row["name"]] != row["math_verify"]] == []


def test_the_docs_give_the_figures_of_the_table() -> None:
    docs = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    for judge, title in (("asyncrl", "reward math"), ("math_verify", "math-verify"), ("dapo", "DAPO's scorer")):
        told = Counter((row[judge], row["human"]) for row in ANSWERS)
        figures = told[True, True] + told[False, False], told[True, False], told[False, True]
        assert "| {} | {} | {} | {} |".format(title, *figures) in docs
    assert f"of {len(ANSWERS)} answers" in docs
