import string
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.rewards import RewardConfig
from asyncrl.rewards import build_reward
from asyncrl.rewards.math import check_truth, final_answer, math_reward, same_answer
from tests.make import row


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
