"""The built-in task: generated word problems with a careful solution and a hasty guess each. Pure and seeded.

A problem of level k is a short story that takes k operations to solve: an opening, some events, a question. The careful
solver writes every operation. The hasty one only adds the first two numbers, which reinforcement learning has to
unlearn.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = (1, 2, 3)

_NAMES = ("Mia", "Tom", "Ana", "Ben", "Lea", "Max", "Eva", "Sam", "Zoe", "Leo", "Ida", "Jon")
_THINGS = ("apples", "books", "cards", "pens", "shells", "stamps", "eggs", "balls", "keys", "nuts", "stones", "cups")
_BOXES = ("boxes", "bags", "jars", "bowls")
_GAINS = ("gets", "finds", "buys", "wins")
_LOSSES = ("loses", "sells", "breaks", "drops")
_HASTE = ("", "Easy. ", "I guess. ", "Just add. ")
_HELD_OUT_SHARE = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """`careful` and `hasty` are whole responses that end with `Answer: N`; the careful N is always `answer`.

    `equations` are the operations of the careful solution, such as `("3+4=7.", "7*2=14.")`.
    """

    level: int
    question: str
    equations: tuple[str, ...]
    careful: str
    hasty: str
    answer: int
    hasty_answer: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One sentence of a story: the operation it stands for (None for a plain opening) and its numbers."""

    sentence: str
    numbers: tuple[int, ...]
    operator: str | None
    value: int


def make_problem(rng: random.Random, level: int) -> Problem:
    """One problem that takes `level` operations; every number in it lies in [2, 50], at level 3 in [2, 999].

    Raises ValueError: a level that is not in LEVELS.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level} is not one of {LEVELS}")
    largest = 999 if level == 3 else 50
    steps: tuple[_Step, ...] = ()
    # Stories whose numbers leave the range are drawn again: planning them backwards would take more code.
    while not steps or not all(2 <= step.value <= largest for step in steps):
        steps = _story(rng, level)
    return _write(rng, level, steps)


def make_problems(num: int, levels: Sequence[int], seed: int, *, held_out: bool) -> list[Problem]:
    """`num` different problems, levels in turn. Held-out and other problems are disjoint, whatever their seeds.

    Raises ValueError: no level, an unknown one, or more problems than the task has.
    """
    if not levels:
        raise ValueError(f"levels is empty: choose from {LEVELS}")
    rng = random.Random(f"{seed}/{held_out}")
    problems: dict[str, Problem] = {}
    attempts = 0
    while len(problems) < num:
        attempts += 1
        if attempts > 1000 + 100 * num:
            raise ValueError(f"levels {tuple(levels)} hardly have {num} different problems: {len(problems)} found")
        problem = make_problem(rng, levels[len(problems) % len(levels)])
        if is_held_out(problem.question) == held_out:
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def make_equations(rng: random.Random, num: int) -> list[str]:
    """`num` bare equations in the numbers of levels 1 and 2, every fact as likely as any other."""
    equations = []
    while len(equations) < num:
        operator, operand, other = rng.choice("+-*/"), rng.randint(2, 9), rng.randint(2, 48)
        total = other * operand if operator in "*/" else other + operand
        if total <= 50:
            left, result = (total, other) if operator in "-/" else (other, total)
            equations.append(f"{left}{operator}{operand}={result}.")
    return equations


def is_held_out(question: str) -> bool:
    """True if a question belongs to the test side; depends on its text only, so that no seed can mix the sides."""
    return zlib.crc32(question.encode()) % _HELD_OUT_SHARE == 0


def words() -> list[str]:
    """Every word of the task, with its leading space, for a small vocabulary."""
    problems = make_problems(4096, LEVELS, seed=0, held_out=False)
    texts = (text for problem in problems for text in (problem.question, problem.careful, problem.hasty))
    return sorted({word for text in texts for word in re.findall(r" ?[A-Za-z]{2,}", text)})


def _story(rng: random.Random, level: int) -> tuple[_Step, ...]:
    name, things, box = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_BOXES)
    boxed = rng.random() < 0.2
    asks = rng.choice(("left", "left", "left", "left", "price", "share"))
    num_events = level - boxed - (asks != "left")
    if num_events < 0:
        return ()
    steps = [_opening(rng, name, things, box if boxed else None, level)]
    for _ in range(num_events):
        steps.append(_event(rng, name, steps[-1].value, level))
    steps.append(_question(rng, name, things, box, asks, steps[-1].value))
    return tuple(steps)


def _opening(rng: random.Random, name: str, things: str, box: str | None, level: int) -> _Step:
    if box is not None:
        count, each = rng.randint(2, 9), rng.randint(2, 9)
        return _Step(f"{name} has {count} {box} of {each} {things}.", (count, each), "*", count * each)
    count = rng.randint(10, 99) if level == 3 else rng.randint(2, 20)
    verb = rng.choice(("has", "starts with"))
    return _Step(f"{name} {verb} {count} {things}.", (count,), None, count)


def _event(rng: random.Random, person: str, value: int, level: int) -> _Step:
    operand = rng.randint(10, 99) if level == 3 else rng.randint(2, 9)
    if rng.random() < 0.4:
        return _Step(f"{person} {rng.choice(_GAINS)} {operand} more.", (operand,), "+", value + operand)
    return _Step(f"{person} {rng.choice(_LOSSES)} {operand}.", (operand,), "-", value - operand)


def _question(rng: random.Random, name: str, things: str, box: str, asks: str, value: int) -> _Step:
    factor = rng.randint(2, 9)
    if asks == "price":
        text = f"{name} sells all for {factor} coins each. How many coins is that?"
        return _Step(text, (factor,), "*", value * factor)
    if asks == "share":
        text = f"{name} puts all into {factor} {box}. How many are in each?"
        # 0 for a remainder: the story is then rejected
        return _Step(text, (factor,), "/", value // factor if value % factor == 0 else 0)
    return _Step(f"How many {things} are there now?", (), None, value)


def _write(rng: random.Random, level: int, steps: tuple[_Step, ...]) -> Problem:
    numbers = [number for step in steps for number in step.numbers]
    equations, before = [], 0
    for step in steps:
        if step.operator is not None:
            # An opening of two numbers (boxes of things) brings both operands; other steps go on from the result.
            left = step.numbers[0] if len(step.numbers) == 2 else before
            equations.append(f"{left}{step.operator}{step.numbers[-1]}={step.value}.")
        before = step.value
    careful = " ".join([rng.choice(("Steps:", "Work:")), *equations])
    return Problem(
        level=level,
        question=" ".join(step.sentence for step in steps),
        equations=tuple(equations),
        careful=f"{careful} Answer: {before}",
        hasty=f"{rng.choice(_HASTE)}Answer: {sum(numbers[:2])}",
        answer=before,
        hasty_answer=sum(numbers[:2]),
    )
