"""The forms in which datasets write the tests of a program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.data.rows import PromptRow
from asyncrl.errors import explain
from asyncrl.rewards.code.statements import Statements, read_statements

_READS, _CALLED = ("stdin", "stdin_stdout"), ("functional", "function_call")
_DO = 'give extra_info.tests as {"inputs": [...], "outputs": [...]}, as a list of {"input", "output"}, or as Python'


@dataclass(frozen=True, slots=True)
class Case:
    """`given`: the program's input, or the arguments of `function`. `wanted`: the accepted outputs or return values."""

    given: Any
    wanted: tuple[Any, ...]
    function: str


def tests_of(row: PromptRow) -> tuple[Case, ...] | Statements:
    """The tests in `extra_info.tests`, or in the ground truth.

    Raises ValueError: not a form of docs/rewards.md, or no program could fail them.
    """
    extra = dict(row.extra)
    asked = f"the tests of {row.origin}"
    text = extra.get("tests", row.ground_truth)
    found = _loaded(_loaded(text))
    # Statements may be one text or a list of lines; objects may be columns or records.
    if isinstance(found, list) and found and all(isinstance(line, str) for line in found):
        found = "\n".join(found)
    if isinstance(found, str) and found.strip():
        return read_statements(found, _text(extra.get("entry_point")), asked)
    if isinstance(found, dict) and isinstance(found.get("inputs"), list):
        found = _objects(found, asked)
    if not isinstance(found, list) or not all(isinstance(test, dict) for test in found):
        raise ValueError(explain(asked, f"neither inputs nor statements: {text[:100]}", _DO))
    if not found:
        raise ValueError(explain(asked, "an empty list", "give at least one test"))
    metadata = extra.get("metadata")
    cases = tuple(_case(test, metadata, f"{asked}, number {number}") for number, test in enumerate(found))
    if all(value is None if case.function else not value.strip() for case in cases for value in case.wanted):
        raise ValueError(explain(asked, "every output is empty: a program that does nothing passes", "give an output"))
    return cases


def _loaded(value: Any) -> Any:
    """Parses JSON, which may be nested in a text; other values are returned unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    except RecursionError:
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value != "null" else ""


def _objects(tests: Mapping[str, Any], asked: str) -> list[dict[str, Any]]:
    inputs, outputs = tests["inputs"], tests.get("outputs")
    if not isinstance(outputs, list) or len(outputs) != len(inputs) or not inputs:
        num_outputs = len(outputs) if isinstance(outputs, list) else "no"
        raise ValueError(explain(asked, f"{len(inputs)} inputs and {num_outputs} outputs", "give as many of each"))
    function = {"fn_name": tests.get("fn_name")}
    return [{"input": i, "output": o, **function} for i, o in zip(inputs, outputs, strict=True)]


def _case(test: Mapping[str, Any], metadata: Any, asked: str) -> Case:
    if not {"input", "output"} <= test.keys():
        raise ValueError(explain(asked, f"the keys {', '.join(map(str, test)) or 'none'}", "give input and output"))
    given, wanted = test["input"], test["output"]
    kind = _text(test.get("testtype") or test.get("type"))
    if kind and kind not in (*_READS, *_CALLED):
        raise ValueError(explain(asked, f"a test of type {kind}", f"use one of {', '.join((*_READS, *_CALLED))}"))
    function = _text(test.get("fn_name")) or _func_name(test.get("metadata"))
    if kind in _CALLED and not (function := function or _func_name(metadata)):
        raise ValueError(explain(asked, f"{kind}, and no name of a function", "give fn_name, or func_name in metadata"))
    # Without a function the program reads standard input, whatever its type says.
    if kind in _READS or not function:
        return Case(_lines(given), (_lines(wanted),), "")
    if isinstance(given, list):
        is_wrapped = isinstance(wanted, list) and len(wanted) == 1  # some datasets wrap the value in a list
        return Case(given, (wanted, wanted[0]) if is_wrapped else (wanted,), function)
    try:
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
        return Case(arguments, (json.loads(wanted) if isinstance(wanted, str) else wanted,), function)
    except (ValueError, AttributeError, RecursionError):
        found = f"input {json.dumps(given)[:60]} and output {json.dumps(wanted)[:60]}, and fn_name={function}"
        do = "give the arguments as a list, or input and output as texts with a JSON value on each line"
        raise ValueError(explain(asked, found, do)) from None


def _func_name(metadata: Any) -> str:
    found = _loaded(metadata)
    return _text(found.get("func_name")) if isinstance(found, dict) else ""


def _lines(value: Any) -> str:
    """`value` as text; some datasets write a text as a list of lines."""
    is_listed = isinstance(value, Sequence) and not isinstance(value, str)
    return "\n".join(map(str, value)) + "\n" if is_listed else str(value)
