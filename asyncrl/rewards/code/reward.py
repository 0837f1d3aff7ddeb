"""Reward 1 for a program that passes its tests, run by `asyncrl.workers.sandbox`."""

from __future__ import annotations

import json
import math
import re
import secrets
import textwrap
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.rewards.code.forms import Case, tests_of
from asyncrl.rewards.code.statements import Statements
from asyncrl.rewards.reward import RewardResult
from asyncrl.workers.sandbox import SandboxLimits, SandboxResult, require_protection, run_python

_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*)```[ \t]*(?P<tag>\w*)[^\n`]*\n(?P<text>.*?)(?:(?P<end>^[ \t]*```(?!\w))|(?=^[ \t]*```)|\Z)",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("python", "python3", "py")
_SHORTEST_S = 0.05

_Asked = Literal["call", "test"]


@dataclass(frozen=True, slots=True)
class _Outcome:
    num_passed: int
    num_tests: int
    is_limited: bool = False


class CodeReward:
    """1 if every test passes within the limits of `reward.code`, else 0; stops at the first failure.

    Parts: `correct`; `answered` (there was a program); `passed`, the share of tests before the first failure;
    `out_of_limits` (a limit of time, memory, output, files or processes).
    """

    def __init__(self, config: RewardConfig) -> None:
        limits = asdict(config.code)
        require_protection("reward.code", basic_allowed=limits.pop("allow_basic_sandbox"))
        self._harness = Path(__file__).with_name("harness.py").read_text(encoding="utf-8")
        self._limits = SandboxLimits(**limits)

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        """Raises ValueError: the tests of the row cannot judge a program."""
        tests = tests_of(row)
        names = tests.names if isinstance(tests, Statements) else {case.function for case in tests if case.function}
        program = find_program(response, names)
        ends = time.monotonic() + self._limits.timeout_s
        if program is None:
            outcome = _Outcome(0, 1)
        elif isinstance(tests, Statements):
            outcome = self._run_statements(program, tests, ends)
        else:
            outcome = self._run_cases(program, tests, ends)
        passed = outcome.num_passed / outcome.num_tests
        correct = float(outcome.num_passed == outcome.num_tests)
        answered = float(program is not None)
        parts = (("correct", correct), ("answered", answered), ("passed", passed))
        return RewardResult(correct, (*parts, ("out_of_limits", float(outcome.is_limited))))

    def _run_statements(self, program: str, tests: Statements, ends: float) -> _Outcome:
        names = {"wanted": sorted(tests.names), "modules": sorted(tests.modules)}
        how = {"code": tests.code, "entry_point": tests.entry_point} | names
        result, found = self._ask(program, "test", how, ends)
        match found:
            case [[int(passed), 0]] if passed > 0:
                return _Outcome(1, 1)
        return _Outcome(0, 1, bool(result.limit))

    def _run_cases(self, program: str, tests: tuple[Case, ...], ends: float) -> _Outcome:
        for number, case in enumerate(tests):
            if case.function:
                how = {"function": case.function, "arguments": case.given}
                result, found = self._ask(program, "call", how, ends)
                passed = any(equal(value, wanted) for value in found for wanted in case.wanted)
            else:
                result = self._run(program, "input", case.given, ends)
                passed = result.succeeded and printed(result.stdout, case.wanted[0])
            if not passed:
                return _Outcome(number, len(tests), bool(result.limit))
        return _Outcome(len(tests), len(tests))

    def _ask(self, program: str, form: _Asked, how: dict[str, Any], ends: float) -> tuple[SandboxResult, list[Any]]:
        """The result, and the value that the harness reported: empty if the program failed."""
        mark = secrets.token_hex(8)
        result = self._run(program, form, json.dumps({"mark": mark, "how": how}), ends)
        return result, reported(result.stdout, mark) if result.succeeded else []

    def _run(self, program: str, form: Literal["input"] | _Asked, stdin: str, ends: float) -> SandboxResult:
        """Raises ProcessDied, OSError: the sandbox could not start it."""
        whole = f"{self._harness}\n\nmain({program!r}, {form!r})\n"
        result = run_python(whole, stdin, self._until(ends))
        if result.exit_code is None and not result.limit:  # its supervisor was killed: try once more
            result = run_python(whole, stdin, self._until(ends))
        return result

    def _until(self, ends: float) -> SandboxLimits:
        return replace(self._limits, timeout_s=max(_SHORTEST_S, ends - time.monotonic()))


def find_program(response: str, names: Collection[str] = ()) -> str | None:
    """The last Python block that defines one of `names`, else the last block; None: no block.

    Preference: tagged and closed, tagged and unclosed, untagged. Blocks are dedented.
    """
    found: dict[tuple[bool, bool], list[str]] = {}
    for block in _BLOCK.finditer(response):
        if (tag := block["tag"].lower()) in ("", *_PYTHON):
            text = textwrap.dedent(block["text"]) if block["indent"] else block["text"]
            found.setdefault((tag != "", block["end"] is not None), []).append(text)
    if not found:
        return None
    blocks = found[max(found)]
    some = "|".join(map(re.escape, names)) or "(?!)"
    defines = re.compile(rf"^(?:[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(?:{some})\b|(?:{some})[ \t]*[:=])", re.M)
    return next(filter(defines.search, reversed(blocks)), blocks[-1])


# Compares outputs and return values with the expected ones. Pure; the program may have forged its output.


_CLOSE = {"rel_tol": 1e-6, "abs_tol": 1e-9}


def printed(stdout: str, wanted: str) -> bool:
    """Equal up to whitespace, blank lines, and the last digits of expected decimals."""
    left, right = ([words for line in text.split("\n") if (words := line.split())] for text in (stdout, wanted))
    return len(left) == len(right) and all(
        len(a) == len(b) and all(map(_same, a, b)) for a, b in zip(left, right, strict=True)
    )


def reported(stdout: str, mark: str) -> list[Any]:
    """The value that the harness wrote between the last two marks, as a list of one; else empty."""
    found = stdout.split(mark)
    try:
        return [json.loads(found[-2])] if len(found) > 2 else []
    except (ValueError, RecursionError):
        return []


def equal(given: Any, wanted: Any) -> bool:
    """Equal JSON values, up to the last digits of wanted decimals. Booleans are not numbers."""
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(equal, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(equal(given[key], wanted[key]) for key in wanted)
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, float):
        try:
            return math.isclose(given, wanted, **_CLOSE)
        except OverflowError:
            return False
    return given == wanted


def _same(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if not any(c in wanted for c in ".eE"):
        whole, point, decimals = given.partition(".")
        return bool(point) and whole == wanted and whole.lstrip("+-").isdecimal() and not decimals.strip("0")
    try:
        return math.isclose(float(given), float(wanted), **_CLOSE)
    except ValueError:
        return False
