"""Forms of tests, blocks of code and answers of reward code: what is read, and what is refused before a run."""

import json
from pathlib import Path

import pytest

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.errors import DataError
from asyncrl.rewards import check_rows
from asyncrl.rewards.code import find_program, forms
from asyncrl.rewards.code.forms import Case
from asyncrl.rewards.code.harness import free_names, usual
from asyncrl.rewards.code.reward import equal, printed, reported
from asyncrl.rewards.code.statements import Statements


def row(tests: object, **extra: str) -> PromptRow:
    text = tests if isinstance(tests, str) else json.dumps(tests)
    return PromptRow((ChatMessage("user", "?"),), "-", "code", (("tests", text), *extra.items()), "f.jsonl:7")


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        ({"inputs": ["1", ["2", "3"]], "outputs": [4, ["5"]]}, [Case("1", ("4",), ""), Case("2\n3\n", ("5\n",), "")]),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f"}, [Case([1], (2,), "f")]),
        ({"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}, [Case([1], ([2], 2), "f")]),
        ({"inputs": ['[1]\n"a"'], "outputs": ["[2]"], "fn_name": "f"}, [Case([[1], "a"], ([2],), "f")]),
        ({"inputs": ["1"], "outputs": ["2"], "fn_name": None}, [Case("1", ("2",), "")]),
        ([{"type": "stdin_stdout", "input": "1", "output": "2"}], [Case("1", ("2",), "")]),
        ([{"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}], [Case([1], ([2], 2), "f")]),
        (
            [{"testtype": "stdin", "input": "1", "output": "2", "metadata": {"func_name": None}}],
            [Case("1", ("2",), "")],
        ),
        ([{"testtype": "functional", "input": "1", "output": "2"}], [Case([1], (2,), "row")]),
        (
            [{"testtype": "functional", "input": "1", "output": "true", "metadata": '{"func_name": "f"}'}],
            [Case([1], (True,), "f")],
        ),
        (json.dumps(json.dumps([{"input": "1", "output": "2"}])), [Case("1", ("2",), "")]),
    ],
)
def test_forms_of_inputs_and_outputs(tests: object, cases: list[Case]) -> None:
    assert forms.tests_of(row(tests, metadata='{"func_name": "row"}')) == tuple(cases)


def test_the_forms_of_the_page_are_read() -> None:
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    lines = page.partition("## Code")[2].partition("```json\n")[2].partition("```")[0].splitlines()
    assert len(lines) == 5
    for line in lines:
        assert forms.tests_of(row(line))


@pytest.mark.parametrize(
    ("tests", "names"),
    [
        ("assert add(1, 2) == three", {"add", "three"}),
        (["x = 1", "assert add(x) == 2"], {"add"}),
        ("from solution import add\nassert add(1)", {"add"}),
        ("import program as p\nassert p.add(1)", {"add"}),
        ("def check(candidate):\n    assert candidate(1)", {"Solution"}),
    ],
)
def test_names_that_statements_take_from_the_program(tests: object, names: set[str]) -> None:
    found = forms.tests_of(row(tests, entry_point="Solution().add"))
    assert isinstance(found, Statements)
    assert names <= found.names | {"Solution"}
    assert not {"x", "candidate", "p"} & found.names


@pytest.mark.parametrize(
    ("tests", "found"),
    [
        ("def check(candidate):\n    assert candidate(1)", "no extra_info.entry_point"),
        ("def helper():\n    assert add(1)", "nothing in them that runs can fail"),
        ("print(add(1))", "nothing in them that runs can fail"),
        ("class TestAdd:\n    def test_it(self):\n        add(1)", "nothing in them that runs can fail"),
        ("import unittest\nclass T(unittest.TestCase):\n    pass", "nothing in them that runs can fail"),
        ("eJxyz", "nothing in them that runs can fail"),
        ("assert True", "no name that a program could define"),
        ("def test_it():\n    yield add(1)\n    assert add(1)", "a test is a generator"),
        ("async def test_it():\n    yield add(1)\n    assert add(1)", "a test is a generator"),
        ("class TestAdd:\n    def test_it(self):\n        assert add(1)\n        yield", "a test is a generator"),
        ("def test_it(tmp_path):\n    assert add(1)", "test_it takes arguments"),
        ("class TestAdd:\n    def test_it(self, tmp_path):\n        assert add(1)", "test_it takes arguments"),
        ("import pytest\n@pytest.mark.parametrize('a', [1])\ndef test_it(a):\n    assert add(a)", "parametrize"),
        ("import pytest\n@pytest.fixture(autouse=True)\ndef it(): pass\nassert add(1)", "fixture"),
        ("def setup_module():\n    pass\ndef test_it():\n    assert add(1)", "setup_module"),
        ("import unittest\n@unittest.skip('')\ndef test_it():\n    assert add(1)", r"may be skipped \(skip\)"),
        ("from unittest import skip\n@skip\ndef test_it():\n    assert add(1)", r"may be skipped \(skip\)"),
        ("import pytest\ndef test_it():\n    pytest.skip()\n    assert add(1)", r"may be skipped \(skip\)"),
        ("from your_module import add\nassert add(1)", "import your_module, which is not installed"),
        ("from .solution import add\nassert add(1)", "import .solution, which is not installed"),
        ("assert add(", "SyntaxError"),
        ([{"input": "1", "output": " \n"}], "every output is empty"),
        ({"inputs": [[1]], "outputs": [None], "fn_name": "f"}, "every output is empty"),
        ([], "an empty list"),
        ([{"input": "1"}], "number 0.*the keys input"),
        ([{"input": "1", "output": "2"}, {"type": "interactive", "input": "", "output": ""}], "number 1.*interactive"),
        ([{"testtype": "functional", "input": "1", "output": "1"}], "functional, and no name"),
        ([{"fn_name": "f", "input": "x", "output": "1"}], 'input "x".*fn_name=f'),
        ([1, 2], "neither inputs nor statements"),
        ({}, "neither inputs nor statements"),
        (42, "neither inputs nor statements"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": [[1], 3], "outputs": [1, 3], "fn_name": "f"}, r"number 1.*input 3 .* fn_name=f"),
    ],
)
def test_tests_that_cannot_judge_are_refused_by_file_and_line(tests: object, found: str) -> None:
    with pytest.raises(DataError, match=rf"(?s)the tests of f\.jsonl:7.*{found}.*do:"):
        check_rows(RewardConfig(function="code"), [row(tests)])


@pytest.mark.parametrize(
    ("response", "names", "program"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```\n```\nc\n```", (), "b\n"),
        ("```Python3 title=x\r\na\n```", (), "a\n"),
        ("```python\nnever closed", (), "never closed"),
        ("```python\na\n```\n```python\nnever closed", (), "a\n"),
        ("```python\nnot closed\n```python\na\n```", (), "a\n"),
        ("```\na\n```\n```\nb\n```", (), "b\n"),
        ("```text\nno\n```\n```cpp\nint\n```", (), None),
        ("```\n3 4\n```\n```python\nnever closed", (), "never closed"),
        ("no block", (), None),
        ("1. so:\n   ```python\n   if a:\n       b\n   ```", (), "if a:\n    b\n"),
        ("```python\ndef f():\n```\n```python\nprint(f())\n```", ("f",), "def f():\n"),
        (
            "```python\nclass S:\n  async def f(self):\n```\n```python\nprint(f())\n```",
            ("f", "g"),
            "class S:\n  async def f(self):\n",
        ),
        ("```python\nf = lambda: 1\n```\n```python\nprint(f())\n```", ("f",), "f = lambda: 1\n"),
        ("```python\ndef ff():\n```\n```python\nx = f()\n```", ("f",), "x = f()\n"),
        ("```python\ndef f():\n```\n```python\nprint(f())\n```", (), "print(f())\n"),
    ],
)
def test_which_block_is_the_program(response: str, names: tuple[str, ...], program: str | None) -> None:
    assert find_program(response, names) == program


@pytest.mark.parametrize(
    ("given", "wanted", "right"),
    [
        ({"a": True}, {"a": 1}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2.0}]}, True),
        ({"a": 1}, {"a": 1, "b": 1}, False),
        ({"a": None}, {"b": None}, False),
        ([True], [1], False),
        ([1.0000001], [1.0], True),
        (10**400, 1.0, False),
        ("1", 1, False),
        (None, 0, False),
        (float("nan"), 1.0, False),
    ],
)
def test_equal_values(given: object, wanted: object, right: bool) -> None:
    assert equal(given, wanted) is right


@pytest.mark.parametrize(
    ("stdout", "wanted", "right"),
    [
        ("\n1\n\n2 3\n\n\n", "1\n2 3", True),
        ("1\n2 3", "1\n\n2  3 \n", True),
        ("1 2\n3", "1\n2 3", False),
        ("", "0", False),
        ("1\n2", "1", False),
    ],
)
def test_blank_lines_make_no_difference_and_other_line_breaks_do(stdout: str, wanted: str, right: bool) -> None:
    assert printed(stdout, wanted) is right


def test_a_report_is_what_stands_between_the_last_marks() -> None:
    assert reported("noise M [1] M late noise", "M") == [[1]]
    assert reported("M 1 M 2 M", "M") == [2]
    for forged in ("", "M", "M [1]", "M nonsense M", "M " + "[" * 100_000 + " M"):
        assert reported(forged, "M") == []


def test_names_that_come_without_an_import() -> None:
    source = "import os\nx: List[int] = sqrt(os.y)\ndef f(a):\n    global z\n    z = Counter(a, missing)\n    return re"
    assert free_names(source) == {"List", "int", "sqrt", "Counter", "missing", "re"}
    found = usual(free_names(source), ("collections", "math", "typing"))
    assert {name: value.__module__ for name, value in found.items() if name != "re"} == {
        "List": "typing",
        "sqrt": "math",
        "Counter": "collections",
    }
    assert usual({"gcd", "math"}).keys() == {"math"}
