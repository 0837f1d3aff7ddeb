"""The built-in tools in this process."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.environments import ToolUseConfig
from asyncrl.environments.tools import build_tools, schema_of
from asyncrl.environments.tools.calculator import Calculator
from asyncrl.environments.tools.search import Search
from asyncrl.errors import ConfigError


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from(["+", "-", "*"]))
def test_integers_as_python_has_them(a, b, sign):
    assert Calculator().call(f"({a}){sign}({b})") == str(eval(f"({a}){sign}({b})"))


@given(st.integers(-99, 99), st.integers(1, 99))
def test_fractions_are_exact(a, b):
    said = Calculator().call(f"{a}/{b}*{b}/3 + 1/3")
    assert Fraction(said.split(" = ")[0]) == Fraction(a, 3) + Fraction(1, 3)


@pytest.mark.parametrize(
    ("expression", "result"),
    [("0.1+0.2", "3/10 = 0.3"), ("2^10", "1024"), (" 7 // 2 ", "3"), ("-7 % 3", "2"), ("2**-1", "1/2 = 0.5")],
)
def test_results(expression, result):
    assert Calculator().call(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "x",
        "__import__('os')",
        "9**9**9",
        "2**99999",
        "1 if 1 else 2",
        "True",
        "1e999999999",
        "(" * 400,
        "1" * 2000,
        "1/0",
    ],
)
def test_anything_else_is_an_error_at_once(expression):
    with pytest.raises((ValueError, ZeroDivisionError)):
        Calculator().call(expression)


@pytest.fixture
def corpus(tmp_path):
    documents = [
        {"title": "Cats", "text": "The cat sleeps most of the day. A cat hunts at night."},
        {"title": "Dogs", "text": "The dog follows its owner all day."},
        {"title": "Stars", "text": "Stars shine at night."},
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, documents)) + "\n\n")
    return path


def test_search_ranks_rare_and_frequent_words_first(corpus):
    search = Search(str(corpus))
    search.start()
    assert search.call("cat night").startswith("1. Cats\n")
    assert "2. Stars" in search.call("cat night")
    assert search.call("shine").startswith("1. Stars")
    assert search.call("the day", num_results=1).count("\n") == 1
    assert search.call("unheard of words?") == "No document has any of these words." or "of" in "sleeps most of"
    assert search.call("zebra") == "No document has any of these words."


def test_a_bad_document_is_named(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"title": "a", "text": "b"}\n{"title": "a"}\n')
    with pytest.raises(ConfigError, match=r"corpus.jsonl:2"):
        Search(str(path)).start()


class Unfinished:
    name = "half"


class Echo:
    name = "echo"
    description = "Says it again."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}  # noqa: RUF012

    def call(self, text):
        return text


def test_tools_are_built_by_name_and_what_is_none_is_named():
    calculator, echo = build_tools(ToolUseConfig(tools=["calculator", f"{__name__}:Echo"]))
    assert schema_of(calculator)["function"]["parameters"]["required"] == ["expression"]
    assert echo.call("x") == "x"
    for tools, found in (
        ([f"{__name__}:Unfinished"], "no description, parameters, call"),
        (["calculater"], "did you mean 'calculator'"),
        (["calculator", "calculator"], "two are called calculator"),
    ):
        with pytest.raises(ConfigError, match=found):
            build_tools(ToolUseConfig(tools=tools))
    with pytest.raises(ConfigError, match="no such file"):
        build_tools(ToolUseConfig(tools=["search"], corpus="/nowhere.jsonl"))
