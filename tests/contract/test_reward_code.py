"""Reward code against programs of every kind, in the real sandbox."""

import json

import pytest

from asyncrl.config.rewards import CodeRewardConfig, RewardConfig
from asyncrl.rewards import build_reward
from tests.contract.test_reward_code_programs import result_of
from tests.make import row

pytestmark = pytest.mark.timeout(180)

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"}


def judge(program: str, tests: object, **extra: str):
    result = result_of(program, tests, **extra)
    assert result.reward == dict(result.parts)["correct"]
    return dict(result.parts)


def test_programs_that_read_and_print() -> None:
    right = judge("a, b = map(int, input().split())\nprint(a + b, '')", SUMS)
    assert right == {"correct": 1.0, "answered": 1.0, "passed": 1.0, "out_of_limits": 0.0}
    half = judge("input(); print(3)", SUMS)
    assert (half["correct"], half["passed"]) == (0.0, 0.5)
    assert judge("print(3.0000000001)", {"inputs": [""], "outputs": ["3.0"]})["correct"] == 1.0
    assert judge("print(1000000001)", {"inputs": [""], "outputs": ["1000000002"]})["correct"] == 0.0
    assert judge("print('a b')", {"inputs": [""], "outputs": ["a\nb"]})["correct"] == 0.0
    assert judge("print(12345679.0)", {"inputs": [""], "outputs": ["12345678"]})["correct"] == 0.0
    assert judge("print('12345678.0 3.00 0x1')", {"inputs": [""], "outputs": ["12345678 3 0x1"]})["correct"] == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    print('noise')\n    return a + b",
        "class Solution:\n    def add(self, a, b):\n        return a + b",
    ],
)
def test_functions_that_are_called(program: str) -> None:
    assert judge(program, CALLS)["correct"] == 1.0
    assert judge(program.replace("a + b", "a - b"), CALLS)["correct"] == 0.0


@pytest.mark.parametrize(
    ("value", "wanted", "right"),
    [
        ("12345679.0", 12345678, False),
        ("3.0", 3, True),
        ("3", 3.0, True),
        ("3.0000000001", 3.0, True),
        ("True", 1, False),
        ("True", 1.0, False),
        ("10**400", 7.0, False),
    ],
)
def test_the_wanted_value_says_how_close_is_close(value: str, wanted: object, right: bool) -> None:
    tests = {"inputs": [[]], "outputs": [wanted], "fn_name": "f"}
    assert judge(f"def f():\n    return {value}", tests)["correct"] == right


@pytest.mark.parametrize("answer", ["'[' * 100000", "'1' * 5000", "'nonsense'"])
def test_a_forged_answer_is_wrong_and_breaks_nothing(answer: str) -> None:
    forged = f"import json\njson.dumps = lambda *a, **k: {answer}\ndef add(a, b):\n    return 1"
    assert judge(forged, CALLS)["correct"] == 0.0


@pytest.mark.parametrize("program", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_ending_before_the_tests_does_not_pass_them(program: str) -> None:
    assert judge(program, "assert add(1, 2) == 3")["correct"] == 0.0


def test_a_limit_is_reported() -> None:
    assert judge("while True: pass", SUMS) == {"correct": 0.0, "answered": 1.0, "passed": 0.0, "out_of_limits": 1.0}


def test_all_tests_of_a_response_share_its_time() -> None:
    tests = {"inputs": ["", ""], "outputs": ["1", "1"]}
    reward = build_reward(RewardConfig(function="code", code=CodeRewardConfig(timeout_s=4.0)))
    parts = dict(reward("```python\nimport time\ntime.sleep(2.5)\nprint(1)\n```", row(json.dumps(tests))).parts)
    assert (parts["correct"], parts["out_of_limits"]) == (0.0, 1.0)


def test_a_response_without_a_program_is_no_answer() -> None:
    silent = build_reward(RewardConfig(function="code"))("print(3)", row(json.dumps(SUMS)))
    assert silent.parts[:2] == (("correct", 0.0), ("answered", 0.0))


def test_tests_that_are_none_name_the_row() -> None:
    with pytest.raises(ValueError, match=r"tests of f:1(?s:.)*neither inputs nor statements"):
        judge("pass", "42")
