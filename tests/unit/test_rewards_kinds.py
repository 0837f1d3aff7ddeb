"""Rewards numeric, regex and multiple_choice, and what math answers mean."""

import time

import pytest

from asyncrl.config.rewards import RewardConfig
from asyncrl.rewards import build_reward
from asyncrl.rewards.math import equivalent
from asyncrl.rewards.multiple_choice import chosen_letter
from asyncrl.rewards.numeric import last_number
from tests.make import row

# -- meaning -----------------------------------------------------------------------------------------------------------

MEAN_THE_SAME = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    (r"\{2, 1\}", r"\{1, 2\}"),
    (r"[0, \infty)", r"[0,\infty)"),
    ("1024", "2^{10}"),
    ("4", r"\sqrt{16}"),
    ("$(1, 2)$", "(1, 2)"),
    ("$\\frac{1}{2}$, which is small", "1/2"),
]
MEAN_SOMETHING_ELSE = [
    (r"\sqrt{2}", "1.4"),
    ("(1, 2)", "(2, 1)"),
    ("[0, 1)", "[0, 1]"),
    ("x^2", "x^3"),
    (r"\frac{1}{0}", "1"),
    (r"\{1, 2\}", r"\{1, 3\}"),
    ("\\frac{", "1"),
    ("1 or 2", "1"),
]


@pytest.mark.parametrize(("answer", "truth"), MEAN_THE_SAME)
def test_expressions_that_mean_the_same_are_right(answer: str, truth: str) -> None:
    math = build_reward(RewardConfig())
    assert math(f"So \\boxed{{{answer}}}." if "$" not in answer else f"The answer is {answer}.", row(truth)).reward == 1


@pytest.mark.parametrize(("answer", "truth"), MEAN_SOMETHING_ELSE)
def test_expressions_that_mean_something_else_are_wrong(answer: str, truth: str) -> None:
    assert build_reward(RewardConfig())(f"Answer: {answer}", row(truth)).reward == 0


def test_an_expression_that_takes_for_ever_is_another_one() -> None:
    started = time.process_time()
    assert not equivalent(r"\prod_{n=1}^{10^{9}} \sin(n)", r"\sum_{n=1}^{10^{9}} \cos(n)")
    assert time.process_time() - started < 20
    assert not equivalent("(" * 10_000, "(" * 10_001)


# -- numeric -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("about 3.5 or 4", 4.0),
        ("1,234.5 metres", 1234.5),
        ("-2e-3", -0.002),
        ("3 / 4", 0.75),
        ("1/3", 1 / 3),
        (".5", 0.5),
        ("5.", 5.0),
        ("x2", None),
        ("none", None),
        ("3/0", 0.0),
        ("9" * 500, None),
        ("1e999", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == (None if number is None else pytest.approx(number))


@pytest.mark.parametrize(
    ("response", "truth", "tolerance", "right"),
    [
        ("Answer: 3.1416", "3.14159", 1e-4, True),
        ("Answer: 3.1416", "3.14159", 1e-6, False),
        ("it is 12 or rather 13 kg", "13", 0.0, True),
        ("12 of them. Answer: 13. I had 12 before", "12", 0.0, True),
        ("1e-9", "0", 1e-6, True),
        ("1e-3", "0", 1e-6, False),
        ("-5", "5", 0.1, False),
        ("no", "5", 0.1, False),
        (r"\boxed{\frac{1}{2}}", "0.5", 0.0, True),
        (r"\boxed{\frac{1}{2}}", "2", 0.0, False),
        (r"\boxed{1{,}000}", "1000", 0.0, True),
        (r"\boxed{3\times 10^{5}}", "300000", 0.0, True),
        (r"\boxed{3\times 10^{5}}", "5", 0.0, False),
        ("Answer: -2.5 * 10^-3 m", "-0.0025", 1e-9, True),
        (r"\boxed{2\frac12}", "2.5", 0.0, True),
        (r"\boxed{12.5\text{ m/s}^2}", "12.5", 0.0, True),
        (r"\boxed{90^\circ}", "90", 0.0, True),
        (r"\boxed{\sqrt{2}}", "2", 0.0, False),
        ("0.5", r"\frac{1}{2}", 0.0, True),
        ("2.0", r"\frac{1}{2}", 0.0, False),
        ("7", "1e999", 0.1, None),
        ("2", r"\sqrt{2}", 0.1, None),
        ("2", "2^{10}", 0.1, None),
    ],
)
def test_a_number_within_the_tolerance_is_right(
    response: str, truth: str, tolerance: float, right: bool | None
) -> None:
    """`right` None: the truth is none that could be read."""
    numeric = build_reward(RewardConfig(function="numeric", tolerance=tolerance))
    if right is None:
        with pytest.raises(ValueError, match="is no number"):
            numeric(response, row(truth))
    else:
        assert numeric(response, row(truth)).reward == right


@pytest.mark.parametrize("answer", ["11+8", "38/2", r"\frac{38}{2}", "19*1", "x = 11 + 8", "19/1", "11 + 8 = 19", "19"])
def test_a_number_that_is_still_to_be_computed_is_none(answer: str) -> None:
    is_number = answer in ("19", "11 + 8 = 19", "19/1")
    assert build_reward(RewardConfig(function="numeric"))(f"#### {answer}", row("19")).reward == is_number


def test_a_quotient_of_the_question_is_none() -> None:
    numeric = build_reward(RewardConfig(function="numeric"))
    for question, reward in (("Write 3/4 as a decimal.", 0), ("How much of 4 is 3?", 1)):
        assert numeric(r"\boxed{\frac34}", row("0.75", question)).reward == reward


# -- regex -------------------------------------------------------------------------------------------------------------


def test_the_truth_stands_in_the_pattern_literally() -> None:
    regex = build_reward(RewardConfig(function="regex", pattern=r"(?m)^<answer>{truth}</answer>\s*\Z"))
    assert regex("Well.\n<answer>a.c|d</answer>\n", row("a.c|d")).reward == 1
    assert regex("<answer>abc|d</answer>", row("a.c|d")).reward == 0
    assert regex("<answer>d</answer>", row("a.c|d")).reward == 0
    assert build_reward(RewardConfig(function="regex", pattern=r"\d{3}"))("call 112", row("x")).reward == 1


# -- multiple choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("I choose (B).", "B"),
        ("Answer: B", "B"),
        ("answer: (c) because", "C"),
        (r"so \boxed{D}", "D"),
        (r"\boxed{\text{(A) 42}}", "A"),
        (r"\boxed{B. rain}", "B"),
        ("(A) is wrong, so (C)", "C"),
        ("The answer is option B.", "B"),
        ("**Answer:** **C**", "C"),
        ("Let me think.\nb.", "B"),
        ("(A) looks good. Answer: B", "B"),
        ("A dog is an animal", None),
        ("Answer: Because", None),
        ("The answer is a good one: C", None),
        ("The answer is a good one: (C)", "C"),
        ("The answer is I am not sure", None),
        ("Final answer: A banana", None),
        ("Final answer: A. banana", "A"),
        ("Answer: A because it rains", "A"),
        ("Answer: I", "I"),
        ("", None),
    ],
)
def test_the_letter_of_the_choice(response: str, letter: str | None) -> None:
    assert chosen_letter(response) == letter


def test_a_choice_is_judged() -> None:
    choice = build_reward(RewardConfig(function="multiple_choice"))
    assert choice("Answer: B", row("(B)")).reward == 1
    assert choice("Answer: B", row("B. rain")).reward == 1
    assert choice("Answer: B", row("a")).reward == 0
    assert choice("hm", row("A")).parts == (("correct", 0.0), ("answered", 0.0))
    with pytest.raises(ValueError, match=r"(?s)f:1.*'42'"):
        choice("Answer: B", row("42"))
