"""Reward code as a judge: programs that are wrong and programs that are right, under every form of tests, in the real
sandbox."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import psutil
import pytest

from asyncrl.config.rewards import CodeRewardConfig, RewardConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.rewards import RewardFunction, RewardResult, build_reward
from tests.make import row

pytestmark = pytest.mark.timeout(400)

LCB = {"input": "1\n2", "output": "3", "testtype": "functional"}
CALLED = {
    "taco": {"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"},
    "primeintellect call": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
    "livecodebench": [{**LCB, "metadata": {"func_name": "add"}}],
}
READ = {
    "lists": {"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]},
    "primeintellect": [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}],
    "lcbv5": [{"input": "1 2", "output": "3", "testtype": "stdin"}],
    "codeforces": [{"input": "1 2", "output": "3"}],
}
STATED = {
    "assert": "assert add(1, 2) == 3",
    "assert as JSON": json.dumps("assert add(1, 2) == 3"),
    "list": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"],
    "main guard": "if __name__ == '__main__':\n    assert add(1, 2) == 3\n",
    "function": "def test_it():\n    assert add(1, 2) == 3",
    "helper": "def test(given, wanted):\n    if given != wanted:\n        raise ValueError(given)\ntest(add(1, 2), 3)",
    "swallowed": "try:\n    assert add(1, 2) == 3\n    print('passed')\nexcept Exception:\n    print('failed')",
    "import": "from solution import add\n\ndef test_it():\n    assert add(1, 2) == 3",
    "async": "async def test_it():\n    assert add(1, 2) == 3",
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(add(1, 2), 3)\n"
        "if __name__ == '__main__':\n    unittest.main()"
    ),
    "unittest async": (
        "from unittest import TestCase, main\nclass T(TestCase):\n    async def test_it(self):\n"
        "        self.assertEqual(add(1, 2), 3)\nmain()"
    ),
    "unittest isolated": (
        "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_it(self):\n"
        "        self.assertEqual(add(1, 2), 3)"
    ),
    "pytest class": (
        "class TestIt:\n    @classmethod\n    def setup_class(cls):\n        cls.one = 1\n"
        "    def setup_method(self, method):\n        self.wanted = 3\n    def test_it(self):\n"
        "        assert add(self.one, 2) == self.wanted"
    ),
    "humaneval": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3",
}
TWO_CASES = """
import unittest
class T(unittest.TestCase):
    def test_one(self):
        self.assertEqual(f(0), 0)
    def test_two(self):
        self.assertEqual(f(1), 0)
"""
ENTRY = {"humaneval": {"entry_point": "add"}}

GUARD = "if __name__ == '__main__':\n    print(add(*map(int, input().split())))\n"
ADD = "def add(a, b):\n    return a + b\n" + GUARD
SUBTRACT = "def add(a, b):\n    return a - b\n" + GUARD
OWN_TESTS = (
    "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        assert {0}\n"
    "def test_it():\n    assert {0}\ndef check(candidate):\n    assert {0}\ntest = TestIt = None\n"
)
WRONG = {
    "plainly": SUBTRACT,
    "own tests": SUBTRACT + OWN_TESTS.format(True) + "def __asyncrl_judged__(value):\n    return True\n",
    "other name": "def plus(a, b):\n    return a + b\n",
    "of a module": "import operator\nprint(operator.add)\n",
    "skips": "from unittest import SkipTest\ndef add(a, b):\n    raise SkipTest\n" + GUARD,
    "skips all": "import unittest\nraise unittest.SkipTest\n",
    "async": "async " + ADD,
    "generator": ADD.replace("return", "yield"),
    "exits": "def add(a, b):\n    raise SystemExit\n" + GUARD,
    "exits at once": "import os\ndef add(a, b):\n    os._exit(0)\n" + GUARD,
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\n" + SUBTRACT,
    "closes its streams": "import os\nos.closerange(0, 3)\n" + SUBTRACT,
    "no Python": "def add(a, b:\n",
}
RIGHT = {
    "plainly": ADD,
    "own tests, noise, a hidden builtin": "sum = max = 0\n" + ADD + OWN_TESTS.format(False) + "print(end='')\n",
    "imports nothing": (
        "def add(a: List[int], b: Optional[int]) -> Union[int, None]:\n"
        "    return reduce(operator.add, [a, b]) if math.isfinite(1) and not isclose(inf, 1) else Counter()\n" + GUARD
    ),
    "from the future": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "def add(a, b):\n    return P(a + b).x\n" + GUARD  # dataclasses look their module up
    ),
}
ALL = {**CALLED, **READ, **STATED}
EACH_WAY = {**STATED, "lists": READ["lists"], "livecodebench": CALLED["livecodebench"]}
METHOD = "class Solution:\n    def add(self, a: List[int], b: int) -> int:\n        return a + b\n"


@cache
def code_reward() -> RewardFunction:
    return build_reward(RewardConfig(function="code", code=CodeRewardConfig(timeout_s=10.0, cpu_s=2)))


def result_of(program: str, tests: object, **extra: str) -> RewardResult:
    text = tests if isinstance(tests, str) else json.dumps(tests)
    row = PromptRow((ChatMessage("user", "?"),), "-", "code", (("tests", text), *extra.items()), "f:1")
    return code_reward()(f"Well:\n```python\n{program}\n```\n", row)


def judge(program: str, tests: object, **extra: str) -> float:
    return result_of(program, tests, **extra).reward


def judged(program: str, forms: dict[str, object]) -> dict[str, float]:
    """Rewards by form of tests."""
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda name: judge(program, forms[name], **ENTRY.get(name, {})), forms)
        return dict(zip(forms, results, strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_pass_no_tests(name: str) -> None:
    forms = ALL if name == "plainly" else EACH_WAY
    assert judged(WRONG[name], forms) == dict.fromkeys(forms, 0.0)


@pytest.mark.parametrize(
    ("own", "tests"),
    [
        ("def abs(x): return 0", "assert abs(add(3, 4) - 7) < 1e-6"),
        ("def sorted(x): return 7", "assert sorted([add(3, 4)]) == [7]"),
        ("def all(x): return True", "assert all(add(n, 1) == n + 1 for n in (1, 2))"),
        ("def range(*n): return ()", "for n in range(3):\n    assert add(n, 1) == n + 1\nassert add(0, 0) == 0"),
        ("class AssertionError(Exception): pass", "try:\n    assert add(1, 2) == 3\nexcept AssertionError:\n    raise"),
        ("class math: isclose = lambda *numbers: True", "assert math.isclose(add(3, 4), 7)"),
        ("def str(x): return ''", "from program import *\nassert str(add(3, 4)) == '7'"),
        ("def abs(x): return 0", "def check(candidate):\n    assert abs(candidate(3, 4) - 7) < 1e-6"),
    ],
)
def test_what_a_program_defines_is_no_builtin_of_its_tests(own: str, tests: str) -> None:
    entry = ENTRY["humaneval"] if "candidate" in tests else {}
    assert judge(f"{SUBTRACT}{own}\n", tests, **entry) == 0.0
    assert judge(f"{ADD}{own}\n", tests, **entry) == 1.0


@pytest.mark.parametrize(
    ("program", "tests", "right"),
    [
        ("def sum(a, b): return a + b", "assert sum(10, 15) == 25", True),
        ("def sum(a, b): return a - b", "assert sum(10, 15) == 25", False),
        ("def sum(a, b): return a + b", "from solution import *\nassert set([sum(1, 1)]) == set([2])", True),
        ("def pow(a, b): return 0\ndef int(a): return 2", "assert pow(int('2'), 3) == 8", False),
        ("def pow(a, b): return 8", "assert pow(int('2'), 3) == 8", True),
        ("def max(a, b): return 3", "assert max(abs(-3), 2) == 3", True),
        ("def abs(x): return x + 1", "assert list(map(abs, [1])) == [2]", True),
        ("def bisect(a, x): return 7", "assert bisect(list(range(2)), 3) == 7", True),
        ("from datetime import datetime\ndef f(d): return d.year", "assert f(datetime(2020, 1, 1)) == 2020", True),
        ("from datetime import datetime\ndef f(d): return d.year", "assert f(datetime.now()) > 2020", True),
        ("import time\nfrom copy import copy\nf = time.time", "assert copy(f()) <= time.time()", True),
        (
            "class TimeoutError(Exception): pass\ndef f(): raise TimeoutError",
            "try:\n    f()\n    assert False\nexcept TimeoutError:\n    pass",
            True,
        ),
        ("import itertools as np\ndef pow(a, b): return a - b", "assert pow(2, 3) == 8 or np is None", False),
    ],
)
def test_what_the_tests_are_about_is_the_programs_and_so_is_what_it_imports(program, tests, right) -> None:
    assert judge(program, tests) == right


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass_all_tests(name: str) -> None:
    forms = ALL if name == "plainly" else EACH_WAY
    assert judged(RIGHT[name], forms) == dict.fromkeys(forms, 1.0)


def test_methods_of_solution_and_other_names_of_the_function() -> None:
    assert judged(METHOD, CALLED) == dict.fromkeys(CALLED, 1.0)
    check = STATED["humaneval"]
    assert judge(METHOD, check, entry_point="Solution().add") == 1.0
    assert judge(METHOD.replace("+", "-"), check, entry_point="Solution().add") == 0.0
    assert judge(ADD, check, entry_point="Solution().add") == 0.0
    texts = [{**LCB, "input": '["a b"]\n["c"]', "output": '["a b", "c"]'}]
    assert judge(ADD, texts, metadata='{"func_name": "add"}') == 1.0
    assert judge(ADD, [{**texts[0], "output": '[["a b", "c"]]'}], metadata='{"func_name": "add"}') == 0.0


@pytest.mark.parametrize(
    ("program", "tests", "right"),
    [
        ("def positive(x):\n    return []", "for x in positive(3):\n    assert x > 0", False),
        ("def positive(x):\n    return [x]", "for x in positive(3):\n    assert x > 0", True),
        ("def f(): pass", "for g in (f,):\n    def later():\n        assert g() is None\n", False),
        ("def sum(a, b):\n    return a * b", "assert sum(10, 15) == 150", True),
        ("def product(a, b):\n    return a * b", "assert sum([10, 15]) == 25", False),
        ("def gcd(a, b):\n    return 1", "def test_it():\n    assert math.gcd(4, 6) == gcd(4, 6)", False),
        ("def gcd(a, b):\n    return 2", "def test_it():\n    assert math.gcd(4, 6) == gcd(4, 6)", True),
        ("def lcm(a, b):\n    return a * b // gcd(a, b)", "assert lcm(4, 6) == 12\nassert gcd(4, 6) == 2", False),
        ("def lcm(a, b):\n    return a * b // gcd(a, b)", "assert lcm(4, 6) == 12\nassert math.gcd(4, 6) == 2", True),
        ("sum = 0\ndef f(): return [1, 2]", "assert sum(f()) == 3", True),
        ("class P:\n    x: int\ndef f(): return P.__annotations__['x'](3)", "assert f() == 3", True),
        ("import unittest\ndef f(x):\n    if x:\n        raise unittest.SkipTest\n    return 0", TWO_CASES, False),
        ("def f(x): return 0", TWO_CASES, True),
        ("def f(): return 0", "def made():\n    yield 1\ntest_it = made\nassert f() == 0", False),
        ("def f(): raise KeyError", "import pytest\nwith pytest.raises(KeyError):\n    f()", True),
        ("def f(): pass", "import pytest\nwith pytest.raises(KeyError):\n    f()", False),
        ("def f(): raise KeyError", "try:\n    f()\n    assert False\nexcept KeyError:\n    pass", True),
        ("def f(): pass", "try:\n    f()\n    assert False\nexcept Exception:\n    pass", False),
    ],
)
def test_what_counts_as_a_test_that_ran(program: str, tests: str, right: bool) -> None:
    assert judge(program, tests) == right


@pytest.mark.parametrize("limit", ["RLIMIT_CPU", "RLIMIT_NOFILE"])
def test_a_program_that_ends_its_supervisor_gets_0(limit: str) -> None:
    """Its attempt does not fail: it would be drawn again."""
    program = f"import resource, time\nresource.prlimit(1, resource.{limit}, (0, 0))\ntime.sleep(1)\n" + ADD
    forms = {"read": READ["lists"], "called": CALLED["taco"], "stated": STATED["assert"]}
    rewards = judged(
        "try:\n" + "".join(f"    {line}\n" for line in program.splitlines()) + "finally:\n    1 / 0", forms
    )
    assert rewards == dict.fromkeys(forms, 0.0)


@pytest.mark.parametrize(("num_ends", "reward"), [(1, 1.0), (2, 0.0)])
def test_an_end_without_a_word_is_the_systems_once_and_then_the_programs(num_ends: int, reward: float) -> None:
    program = "import time\ntime.sleep(2)\n" + ADD
    ended: set[int] = set()
    code_reward()
    with ThreadPoolExecutor(1) as pool:
        judging = pool.submit(judge, program, "assert add(1, 2) == 3")
        while not judging.done():
            for process in psutil.Process().children(recursive=True):
                try:
                    is_program = process.cmdline()[-1:] == ["program.py"]
                    if is_program and process.pid not in ended and len(ended) < num_ends:
                        process.parent().kill()
                        ended.add(process.pid)
                except psutil.NoSuchProcess:
                    pass  # it has ended since
        assert judging.result() == reward
    assert len(ended) == num_ends


# -- inputs and outputs, limits, answers -------------------------------------------------------------------------------


SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"}


def parts_of(program: str, tests: object, **extra: str):
    result = result_of(program, tests, **extra)
    assert result.reward == dict(result.parts)["correct"]
    return dict(result.parts)


def test_programs_that_read_and_print() -> None:
    right = parts_of("a, b = map(int, input().split())\nprint(a + b, '')", SUMS)
    assert right == {"correct": 1.0, "answered": 1.0, "passed": 1.0, "out_of_limits": 0.0}
    half = parts_of("input(); print(3)", SUMS)
    assert (half["correct"], half["passed"]) == (0.0, 0.5)
    assert parts_of("print(3.0000000001)", {"inputs": [""], "outputs": ["3.0"]})["correct"] == 1.0
    assert parts_of("print(1000000001)", {"inputs": [""], "outputs": ["1000000002"]})["correct"] == 0.0
    assert parts_of("print('a b')", {"inputs": [""], "outputs": ["a\nb"]})["correct"] == 0.0
    assert parts_of("print(12345679.0)", {"inputs": [""], "outputs": ["12345678"]})["correct"] == 0.0
    assert parts_of("print('12345678.0 3.00 0x1')", {"inputs": [""], "outputs": ["12345678 3 0x1"]})["correct"] == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    print('noise')\n    return a + b",
        "class Solution:\n    def add(self, a, b):\n        return a + b",
    ],
)
def test_functions_that_are_called(program: str) -> None:
    assert parts_of(program, CALLS)["correct"] == 1.0
    assert parts_of(program.replace("a + b", "a - b"), CALLS)["correct"] == 0.0


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
    assert parts_of(f"def f():\n    return {value}", tests)["correct"] == right


@pytest.mark.parametrize("answer", ["'[' * 100000", "'1' * 5000", "'nonsense'"])
def test_a_forged_answer_is_wrong_and_breaks_nothing(answer: str) -> None:
    forged = f"import json\njson.dumps = lambda *a, **k: {answer}\ndef add(a, b):\n    return 1"
    assert parts_of(forged, CALLS)["correct"] == 0.0


@pytest.mark.parametrize("program", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_ending_before_the_tests_does_not_pass_them(program: str) -> None:
    assert parts_of(program, "assert add(1, 2) == 3")["correct"] == 0.0


def test_a_limit_is_reported() -> None:
    assert parts_of("while True: pass", SUMS) == {"correct": 0.0, "answered": 1.0, "passed": 0.0, "out_of_limits": 1.0}


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
        parts_of("pass", "42")
