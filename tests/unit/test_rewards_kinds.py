"""Rewards numeric, regex and multiple_choice, and what math answers mean."""

import string
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.rewards import RewardConfig
from asyncrl.rewards import build_reward
from asyncrl.rewards.math import check_truth, equivalent, final_answer, math_reward, same_answer
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


# -- math --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{5}.", "5"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{7} and then \boxed{8", "7"),
        (r"\boxed{3} Answer: 4", "3"),
        (r"\boxed{\boxed{3} + 1}", "3"),
        (r"} \boxed{3} {", "3"),
        ("Answer: 4", "4"),
        ("answer: 4\nmore\nAnswer: 6 \n", "6"),
        ("**Answer:** 12", "12"),
        ("Work: 3+4=7. Answer: 7", "7"),
        ("#### 1,234", "1,234"),
        ("Answer: 1\n#### 2", "2"),
        ("#### 2\nAnswer: 1", "1"),
        ("The answer is 5", "5"),
        ("The answer is 5!", "5"),
        (r"\boxed{5!}", "5!"),
        ("so the answer is: $(1, 2)$", "$(1, 2)$"),
        ("5 is what it is", None),
        ("This answers it: 5", None),
        ("Answer:", None),
        ("", None),
    ],
)
def test_the_final_answer_is_found(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


SAME = [
    ("5", "5"),
    ("5.0", "5"),
    ("+5", "5"),
    ("05", "5"),
    ("5.", "5"),
    (".5", "1/2"),
    ("0.25", r"\frac{1}{4}"),
    (r"\dfrac{3}{6}", "1/2"),
    (r"\frac12", "0.5"),
    ("-1/3", r"-\frac{1}{3}"),
    ("-1/3", r"\frac{-1}{3}"),
    ("7/3", r"2\frac{1}{3}"),
    ("-7/3", r"-2 \frac{1}{3}"),
    ("1.5", r"1\frac12"),
    ("-11/4", r"-2\dfrac{3}4"),
    ("2.5", "2 1/2"),
    ("1{,}000", "1000"),
    ("120", "5!"),
    ("Tuesday!", "Tuesday"),
    ("tuesday", "Tuesday"),
    (r"\text{(B)}", "B"),
    ("1.5e3", "1500"),
    (r"12\,345", "12345"),
    (r"0.1\overline{6}", "1/6"),
    (r"\log_2 3", r"\log_{2}{3}"),
    ("q-p", "-(p-q)"),
    (r"28^\circ\text{C}", "28"),
    (r"\frac{x+1}{2}", r"\dfrac{x + 1}{2}"),
    ("1,234,567", "1234567"),
    ("1,234.50", "1234.5"),
    ("$12", "12"),
    (r"\$12.00", "12"),
    ("50%", "50"),
    (r"50\%", "50"),
    ("$x=5$", "5"),
    (r"\boxed{5}", "5"),
    (r"\text{Tuesday}", "Tuesday"),
    ("(1, 2)", "(1,2)"),
    (r"\left(1, 2\right)", "(1,2)"),
    (r"2\sqrt{3}", r"2 \sqrt{3}"),
    ("0.1", "1/10"),
]
DIFFERENT = [
    ("5", "6"),
    ("5", "-5"),
    ("15", "5"),
    ("1/3", "0.333"),
    ("12,34", "1234"),
    ("1/0", "1"),
    ("", "5"),
    ("5", ""),
    ("(1,2)", "(2,1)"),
    ("5 or 6", "5"),
    (r"\frac{x+1}{2}", r"\frac{x+12}{}"),
    (r"f(3)", "f3"),
    ("5.5", r"1\frac12"),
    ("10.5", "2 1/2"),
    ("5", "5!"),
    ("n", "n!"),
    ("12 34", "1234"),
    (r"12\ 34", "1234"),
    ("100%", "1%"),
    ("2n-1", "2n+1"),
    ("3-4i", "3+4i"),
    ("x+y=5", "5"),
    ("2*3", "23"),
    ("(1.414214, 1)", r"(\sqrt{2}, 1)"),
    ("(0.333333, 1)", "(1/3, 1)"),
    ("3//8", "3"),
    ("5 km", "5 m"),
    ("n is even", "n"),
    ("n", "for all n"),
    (r"0.2\frac{1}{2}", "0.25"),
]


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_the_same_answer_in_another_form(answer: str, truth: str) -> None:
    assert same_answer(answer, truth)
    assert same_answer(truth, answer)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers(answer: str, truth: str) -> None:
    assert not same_answer(answer, truth)
    assert not same_answer(truth, answer)


def test_the_reward_and_its_parts() -> None:
    right = math_reward("3+4=7. Answer: 7", row("7"))
    assert (right.reward, right.parts) == (1.0, (("correct", 1.0), ("answered", 1.0)))
    wrong = math_reward("3+4=8. Answer: 8", row("7"))
    assert (wrong.reward, wrong.parts) == (0.0, (("correct", 0.0), ("answered", 1.0)))
    silent = math_reward("no idea 7", row("7"))
    assert (silent.reward, silent.parts) == (0.0, (("correct", 0.0), ("answered", 0.0)))


def test_an_exclamation_mark_is_a_factorial_where_the_truth_has_one() -> None:
    for response in ("The answer is 5!", "The answer is 120", r"\boxed{5!}"):
        assert math_reward(response, row("5!")).reward == 1.0
    assert math_reward("The answer is 5", row("5!")).reward == 0.0
    assert math_reward("The answer is 5!", row("5")).reward == 1.0
    assert math_reward("The answer is 5!", row("120")).reward == 0.0


RESTATED = [
    (r"17 \cdot 23", "391"),
    ("17*23", "391"),
    ("(17)(23)", "391"),
    ("x = 17 * 23", "391"),
    ("11+8", "19"),
    ("(B) 11+8", "19"),
    ("144/12", "12"),
    (r"\frac{144}{12}", "12"),
    (r"\frac{1}{2}+\frac{1}{3}", "5/6"),
    (r"\int_0^1 x^2 dx", "1/3"),
    (r"\frac{d}{dx} x^2", "2x"),
    (r"\frac{\partial}{\partial x} x^2 y", "2xy"),
    (r"\int 2x dx", "x^2"),
    (r"\sum_{k=1}^{3} k", "6"),
    (r"\lim_{x\to 0}\frac{\sin x}{x}", "1"),
    (r"\log_2 8", "3"),
    (r"\gcd(12,18)", "6"),
    (r"\binom52", "10"),
    (r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", "-2"),
    (r"\max(3,5)", "5"),
    (r"\sqrt{144}", "12"),
    (r"\lfloor 7.9\rfloor", "7"),
    ("|-5|", "5"),
    ("2^{10}", "1024"),
    ("5!", "120"),
    (r"\sqrt{2^2+8}", r"2\sqrt{3}"),
    (r"\cos 30^\circ", r"\frac{\sqrt{3}}{2}"),
    (r"\arctan 1", r"\frac{\pi}{4}"),
    (r"\{1+1, 3\}", r"\{2, 3\}"),
    (r"(\sqrt{4}, 3)", "(2, 3)"),
]


@pytest.mark.parametrize(("answer", "truth"), RESTATED)
def test_an_answer_that_is_still_to_be_computed_is_none(answer: str, truth: str) -> None:
    assert math_reward(rf"\boxed{{{answer}}}", row(truth)).reward == 0
    assert math_reward(rf"\boxed{{{answer}}}", row(answer)).reward == 1  # the truth leaves it to be computed too
    assert math_reward(rf"\boxed{{{answer} = {truth}}}", row(truth)).reward == same_answer(f"{answer} = {truth}", truth)


@pytest.mark.parametrize(
    ("question", "answer", "truth"),
    [
        ("Expand (x+1)^2.", "(x+1)^{2}", "x^2+2x+1"),
        (r"Simplify $\sqrt{12}$.", r"\sqrt{12}", r"2\sqrt{3}"),
        ("Simplify √12.", r"\sqrt{12}", r"2\sqrt{3}"),
        ("Write 3/4 as a decimal.", r"\frac34", "0.75"),
        (r"Rationalise $\frac{1}{\sqrt 2}$.", r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
        ("Simplify y = x + x.", "y = x+x", "y = 2x"),
    ],
)
def test_an_expression_of_the_question_is_no_answer(question: str, answer: str, truth: str) -> None:
    assert math_reward(rf"\boxed{{{answer}}}", row(truth, question)).reward == 0
    assert math_reward(rf"\boxed{{{answer}}}", row(truth)).reward == 1
    assert math_reward(rf"\boxed{{{truth}}}", row(truth, question)).reward == 1


@pytest.mark.parametrize(
    ("question", "answer", "truth"),
    [
        ("Which is greater, 3/4 or 2/3?", r"\frac{3}{4}", r"\frac34"),
        ("1,000 or 999?", "1,000", "1000"),
        ("On (0,1), when?", "(0,1)", "0<x<1"),
        ("17*23", r"17\cdot 23 = 391", "391"),
        ("(A) 2x (B) 2x+1", "(B) 2x+1", "B"),
        ("?", "10^{-3}", "0.001"),
        ("?", r"-2\frac{3}{4}", "-2.75"),
        ("?", r"\frac{\sin x}{\cos x}", r"\tan x"),
        ("?", r"\frac{\ln 3}{\ln 2}", r"\log_2 3"),
        ("?", r"\sqrt[3]{4}", "2^{2/3}"),
        ("?", r"\frac12+\frac{\sqrt5}{2}", r"\frac{\sqrt5+1}{2}"),
    ],
)
def test_what_leaves_nothing_to_compute_is_an_answer(question: str, answer: str, truth: str) -> None:
    assert math_reward(rf"\boxed{{{answer}}}", row(truth, question)).reward == 1


def test_a_truth_of_which_nothing_is_left_names_the_row() -> None:
    check_truth(row("0"))
    with pytest.raises(ValueError, match=r"(?s)f:1.*leaves nothing"):
        check_truth(row("$."))


@given(st.integers(-(10**12), 10**12))
def test_every_way_to_write_an_integer_is_right(n: int) -> None:
    for text in (f"Answer: {n}", f"#### {n:,}", rf"\boxed{{{n}.0}}", f"Answer: ${n}$."):
        assert math_reward(text, row(str(n))).reward == 1.0
        assert math_reward(text, row(str(n + 1))).reward == 0.0


@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_compare_as_rationals(a: Fraction, b: Fraction) -> None:
    written = rf"\frac{{{a.numerator}}}{{{a.denominator}}}"
    assert same_answer(written, f"{b.numerator}/{b.denominator}") == (a == b)


PARTS = [
    r"\boxed{",
    "}",
    "Answer:",
    "####",
    "\n",
    " ",
    "</think>",
    "<answer>",
    r"\frac{1}{2}",
    r"\sqrt",
    r"\text{",
    "or",
]
PARTS += [
    "3",
    "12",
    ",",
    ".",
    "e5",
    "%",
    "$",
    r"\,",
    "=",
    r"\approx",
    "(",
    "B",
    ")",
    "x",
    "not",
    "cm",
    "²",
    "π",
    "\u2212",
    "^",
]


@given(
    st.lists(st.sampled_from(PARTS), max_size=20).map("".join), st.one_of(st.sampled_from(PARTS), st.text(max_size=10))
)
def test_no_response_breaks_the_judge(response: str, truth: str) -> None:
    assert math_reward(response, row(truth)).reward in (0.0, 1.0)


COMMANDS = """to mid vee lor cup cap sim approx cong equiv neq le ge times cdot pm ldots dots quad newline text{or} max
text{maybe} Rightarrow implies iff min mod forall in subset oplus star label{8} tag{8} cancel{8} phantom{8}"""
WORDS = " or ; and ; maybe ;//;->;=>;<>;||;..;...;==;:="
SEPARATORS = [*string.punctuation, *WORDS.split(";"), *(f"\\{command} " for command in COMMANDS.split())]


@pytest.mark.parametrize("form", ["\\boxed{%s}", "Answer: %s", "Answer: $%s$", "The answer is %s."])
def test_two_numbers_are_never_one_of_them(form: str) -> None:
    """Whatever stands between them: what cannot be parsed as a whole is not taken for a part of it."""
    written = [f"{first}{between}{second}" for between in SEPARATORS for first, second in (("3", "8"), ("8", "3"))]
    assert [
        text for text in written if text.count("}") == text.count("{") and math_reward(form % text, row("3")).reward
    ] == []


FORMS = ["Answer: %s", "Answer:\n%s", "Answer:\n\n$$%s$$", "Answer:\n\\[\n%s\n\\]", "### Answer:\n%s", "#### %s"]
FORMS += [
    "**Answer:**\n%s",
    "## Final answer\n\n%s\n\nDone.",
    "<answer>\n%s\n</answer>",
    "The answer is: $%s$.",
    "\\boxed{%s}",
]
TRUTHS = ["3", "1/2", r"\sqrt{2}", "(1, 2)", "x^2+1", "no solution", "B", "1,2", "12.5\\%", "5 m"]


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("form", FORMS)
def test_a_truth_is_right_in_every_form(form: str, truth: str) -> None:
    assert math_reward(form % truth, row(truth)).reward == 1.0
    assert math_reward(form % truth, row("77")).reward == 0.0
    judge = build_reward(RewardConfig(function="math"))
    assert judge("<think>Answer: 77</think>" + form % truth, row(truth)).reward == 1.0
    assert judge("<think>" + form % truth, row(truth)).parts[1] == ("answered", 0.0)


LONG = [
    r"\boxed{",
    r"\boxed{1}",
    r"\boxed{1} ",
    "####",
    "Answer:",
    "Answer:\n",
    "<think>",
    " ",
    "\n",
    "#",
    "* ",
    "$",
    "1 ",
]
LONG += ["(", "^{9", "a ", "1,", r"\text{", r"\[", "x=", "</think>", "is ", "\\approx ", "B) "]


@pytest.mark.parametrize("text", LONG)
def test_long_responses_are_judged_at_once(text: str) -> None:
    for response in (text * 100_000, "Answer: " + text * 100_000, r"\boxed{" + text * 130 + "}"):
        math_reward(response, row("9"))


def test_long_numbers_are_judged_at_once() -> None:
    assert math_reward("Answer: " + "9" * 100_000, row("9")).reward == 0.0
    assert math_reward("Answer: " + "9" * 5_000, row("9" * 5_000)).reward == 1.0
