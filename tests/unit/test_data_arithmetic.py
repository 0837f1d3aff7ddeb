import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.dataset import load_rows
from asyncrl.rewards import build_reward
from tests.make import row
from tools.arithmetic import LEVELS, is_held_out, make_equations, make_problem, make_problems, words

TOOL = Path(__file__).parents[2] / "tools" / "make_arithmetic_dataset.py"
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


@given(st.integers(0, 10**9), st.sampled_from(LEVELS))
def test_the_careful_solution_is_right_step_by_step(seed: int, level: int) -> None:
    problem = make_problem(random.Random(seed), level)
    equations = [re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)\.", text) for text in problem.equations]
    assert len(equations) == level
    before = None
    for equation in equations:
        left, operator, right, result = equation.groups()
        assert before in (None, int(left))
        assert OPERATIONS[operator](int(left), int(right)) == int(result)
        assert operator != "/" or int(left) % int(right) == 0
        before = int(result)
    assert before == problem.answer
    assert 2 <= problem.answer <= (999 if level == 3 else 50)
    assert all(text in problem.careful for text in problem.equations)


@given(st.integers(0, 10**9))
def test_bare_equations_are_right_and_in_range(seed: int) -> None:
    equations = make_equations(random.Random(seed), 100)
    assert len(equations) == 100
    for text in equations:
        match = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)\.", text)
        left, operator, right, result = int(match[1]), match[2], int(match[3]), int(match[4])
        assert OPERATIONS[operator](left, right) == result
        assert operator != "/" or left % right == 0
        assert all(2 <= number <= 50 for number in (left, right, result))
    assert {re.sub(r"[\d=.]", "", text) for text in equations} == set(OPERATIONS)


@given(st.integers(0, 10**9), st.sampled_from(LEVELS))
def test_the_question_holds_the_numbers_that_the_solution_uses(seed: int, level: int) -> None:
    problem = make_problem(random.Random(seed), level)
    asked = sorted(int(number) for number in re.findall(r"\d+", problem.question))
    first, *rest = (re.findall(r"\d+", text) for text in problem.equations)
    assert asked == sorted([int(first[0]), int(first[1]), *(int(numbers[1]) for numbers in rest)])
    in_order = [int(number) for number in re.findall(r"\d+", problem.question)]
    assert problem.hasty_answer == in_order[0] + in_order[1]


@given(st.integers(0, 10**9), st.sampled_from(LEVELS))
def test_the_math_reward_judges_both_solvers(seed: int, level: int) -> None:
    problem, reward = make_problem(random.Random(seed), level), build_reward(RewardConfig())
    asked = row(str(problem.answer), problem.question)
    assert reward(problem.careful, asked).reward == 1.0
    assert reward(problem.hasty, asked).reward == float(problem.hasty_answer == problem.answer)


def test_guessing_is_right_sometimes_but_mostly_not() -> None:
    problems = make_problems(2000, (1, 2), seed=0, held_out=False)
    lucky = sum(problem.answer == problem.hasty_answer for problem in problems) / len(problems)
    assert 0.1 < lucky < 0.3


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_train_and_test_never_share_a_problem(seed: int, other_seed: int) -> None:
    train = {problem.question for problem in make_problems(40, (1, 2), seed, held_out=False)}
    test = {problem.question for problem in make_problems(20, (1, 2), other_seed, held_out=True)}
    assert len(train) == 40
    assert len(test) == 20
    assert not train & test
    assert all(map(is_held_out, test))


def test_problems_depend_on_the_seed_alone_and_levels_take_turns() -> None:
    problems = make_problems(30, LEVELS, seed=5, held_out=False)
    assert problems == make_problems(30, LEVELS, seed=5, held_out=False)
    assert problems != make_problems(30, LEVELS, seed=6, held_out=False)
    assert [problem.level for problem in problems] == [1, 2, 3] * 10


def test_the_word_list_covers_every_text() -> None:
    known = set(words())
    for problem in make_problems(1000, LEVELS, seed=99, held_out=True):
        for text in (problem.question, problem.careful, problem.hasty):
            assert set(re.findall(r" ?[A-Za-z]{2,}", text)) <= known
    assert len(known) < 150


@pytest.mark.parametrize("levels", [(), (4,), (0, 1)])
def test_unknown_levels_are_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="level"):
        make_problems(1, levels, seed=0, held_out=False)


def run_tool(out: Path, *arguments: str) -> str:
    command = [sys.executable, str(TOOL), "--out", str(out), "--num-train", "40", "--num-test", "8", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize(("schema", "called"), [("verl", "arithmetic"), ("gsm8k", "gsm8k")])
def test_the_tool_writes_what_the_loader_reads_the_same_again(tmp_path: Path, schema: str, called: str) -> None:
    printed = run_tool(tmp_path, "--schema", schema, "--format", "both", "--levels", "2,3", "--seed", "3")
    names = [f"{called}_{split}.{suffix}" for split in ("train", "test") for suffix in ("jsonl", "parquet")]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)
    assert all(f"wrote {tmp_path / name}" in printed for name in names)
    train, test = load_rows(str(tmp_path / names[0])), load_rows(str(tmp_path / names[2]))
    assert (len(train), len(test)) == (40, 8)
    assert not {row.messages for row in train} & {row.messages for row in test}
    assert [(r.messages, r.ground_truth, r.extra) for r in load_rows(str(tmp_path / names[1]))] == [
        (r.messages, r.ground_truth, r.extra) for r in train
    ]
    asked = {problem.question: str(problem.answer) for problem in make_problems(40, (2, 3), 3, held_out=False)}
    assert {row.messages[-1].content: row.ground_truth for row in train} == asked
    before = {name: (tmp_path / name).read_bytes() for name in names}
    run_tool(tmp_path, "--format", "both", "--levels", "2,3", "--seed", "3")
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


def test_the_files_have_the_schema_of_dapo_math(tmp_path: Path) -> None:
    run_tool(tmp_path)
    record = json.loads((tmp_path / "arithmetic_train.jsonl").read_text().splitlines()[0])
    assert set(record) == {"data_source", "prompt", "reward_model", "extra_info"}
    assert set(record["reward_model"]) == {"ground_truth", "style"}
    assert set(record["prompt"][0]) == {"role", "content"}
