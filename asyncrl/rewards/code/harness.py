"""Runs one program of the policy. The sandbox gets the text of this file, with a call of `main` at its end.

A program that reads input runs as `__main__`; one that is called or tested is the module `program`, without its main
guard. Standard library only, and few imports at the top, since each run repeats them.
"""

from __future__ import annotations

import builtins
import sys
from types import FunctionType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType
    from typing import Any

EXPORTING = ("collections", "math", "itertools", "functools", "heapq", "bisect", "typing", "string")
"""Modules whose exports a program may use without an import; the first that exports a name wins."""
MODULES = (*EXPORTING, "re", "random", "datetime", "copy", "operator", "statistics", "json", "io", "os", "sys", "time")
"""Modules that a program and its tests may use without an import."""
BUILTINS = frozenset(vars(builtins))
JUDGED = "__asyncrl_judged__"
"""The function that each check of the tests calls; asyncrl.rewards.code.statements inserts the calls."""
ALIASES = ("program", "solution")
"""Modules from which tests may import the program."""


def main(program: str, form: str) -> None:
    """`form`: "input" (the program reads standard input), "call" or "test" (standard input holds a JSON request)."""
    if form == "input":
        load(program, "__main__")
        return
    import json
    import os

    out = os.fdopen(os.dup(1), "w")
    request, dumps = json.loads(sys.stdin.read()), json.dumps
    kept = dict(vars(builtins))
    names = load(program, "program")
    found = call(names, **request["how"]) if form == "call" else test(names, kept, **request["how"])
    out.write("\n".join(("", request["mark"], dumps(found, default=plain), request["mark"], "")))
    out.flush()


def load(program: str, name: str) -> dict[str, Any]:
    """Runs the program as a module of this name; returns its namespace."""
    module = type(sys)(name)
    sys.modules[name] = module
    code = compile(program, "<program>", "exec", dont_inherit=True)
    if missing := free_names(program) - vars(builtins).keys():
        # Added to the builtins: the program's namespace must hold only its own names (a function `gcd` that it
        # forgot is not math's).
        builtins.__dict__.update(usual(missing, EXPORTING))
    exec(code, vars(module))
    return vars(module)


def free_names(source: str) -> set[str]:
    """The global names that the source reads but does not bind. Raises SyntaxError."""
    import symtable

    tables = [symtable.symtable(source, "program", "exec")]
    bound = {s.get_name() for s in tables[0].get_symbols() if s.is_assigned() or s.is_imported()}
    used: set[str] = set()
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global():
                (bound if symbol.is_assigned() else used).add(symbol.get_name())
    return used - bound


def usual(missing: Iterable[str], exporting: Iterable[str] = ()) -> dict[str, Any]:
    """The missing names that are in `MODULES`, or exported by one of `exporting`."""
    found: dict[str, Any] = {name: __import__(name) for name in missing if name in MODULES}
    left = {name for name in missing if name not in found and not name.startswith("_")}
    for module in exporting:
        if not left:
            break
        exports = vars(__import__(module))
        found |= {name: exports[name] for name in left & exports.keys()}
        left -= found.keys()
    return found


def call(names: dict[str, Any], function: str, arguments: list[Any]) -> Any:
    """Calls the method of `Solution`, else the function."""
    owner = names.get("Solution")
    target = getattr(owner(), function) if owner is not None and hasattr(owner, function) else names[function]
    return target(*arguments)


def plain(value: Any) -> list[Any]:
    """A collection as a list, for JSON. Raises TypeError: no collection."""
    len(value)
    return sorted(value) if isinstance(value, set | frozenset) else list(value)


def test(
    names: dict[str, Any], kept: dict[str, Any], code: str, entry_point: str, wanted: list[str], modules: list[str]
) -> list[int]:
    """Returns [passed checks, failed checks]; none runs if the program defines no `wanted` name.

    Args:
        kept: the builtins from before the program ran.
        code: the tests, compiled by asyncrl.rewards.code.statements.
        wanted, modules: what they use of the program, and without an import.
    """
    import base64
    import marshal

    given = {name: value for name, value in names.items() if not name.startswith("__")}
    # `def abs` must not replace the builtin in the tests, unless it is what they test.
    given = {name: value for name, value in given.items() if name in wanted or not replaces(name, value)}
    if all(isinstance(given.get(name, sys), type(sys)) for name in wanted):
        return [0, 0]
    names["__all__"] = list(given)  # of `from program import *`
    for alias in ALIASES:
        sys.modules[alias] = sys.modules["program"]
    candidate = eval(entry_point, {**given, "__builtins__": {}}) if entry_point else None
    tests = Tests({**usual(modules), **kept, **given})
    tests.run(marshal.loads(base64.b64decode(code)), candidate)
    return [tests.passed, tests.failed]


def replaces(name: str, value: Any) -> bool:
    """True for a value of the program's own under the name of a builtin or a usual module; exceptions may have one."""
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    is_import = isinstance(value, type(sys)) and sys.modules.get(value.__name__) is value
    is_import = is_import or (name in MODULES and value is getattr(sys.modules.get(name), name, sys))
    return (name in BUILTINS or name in MODULES) and not is_error and not is_import


class Tests:
    """Runs tests in their own namespace, with the program's names as builtins."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.passed = self.failed = 0
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        self.own = vars(module)
        self.own |= {"__builtins__": given, JUDGED: self.judged}

    def judged(self, value: object) -> bool:
        """Counts a check; a failure counts even if the tests catch its exception."""
        passed = bool(value)
        self.passed += passed
        self.failed += not passed
        return passed

    def run(self, code: CodeType, candidate: Any) -> None:
        """Raises the errors of tests, except of unittest cases."""
        exec(code, self.own)
        if candidate is not None and callable(self.own.get("check")):
            finish(self.own["check"](candidate))
        for name, value in list(self.own.items()):
            if isinstance(value, type):
                if value.__module__ == "__main__":
                    self._run_class(name, value)
            elif name.startswith("test") and callable(value) and not takes_arguments(value):
                finish(value())

    def _run_class(self, name: str, kind: Any) -> None:
        unittest = sys.modules.get("unittest")
        if unittest is not None and issubclass(kind, unittest.TestCase):
            self._run_case(kind, unittest)
        elif name.startswith("Test"):  # as pytest: a new instance per test
            hook(kind, "setup_class")
            for test_name in filter(lambda n: n.startswith("test"), dir(kind)):
                instance = kind()
                method = getattr(instance, test_name)
                hook(instance, "setup_method", method)
                finish(method())
                hook(instance, "teardown_method", method)
            hook(kind, "teardown_class")

    def _run_case(self, case: Any, unittest: Any) -> None:
        loader, result = unittest.TestLoader(), unittest.TestResult()
        for name in () if hasattr(case, "asyncSetUp") else loader.getTestCaseNames(case):
            setattr(case, name, finished(getattr(case, name)))
        loader.loadTestsFromTestCase(case).run(result)
        self.failed += not result.wasSuccessful() or bool(result.skipped or result.expectedFailures)


def finish(value: Any) -> None:
    """Awaits the result of an async test. Raises TypeError: a generator, which has not run."""
    from collections.abc import AsyncGenerator, Coroutine, Generator

    if isinstance(value, Coroutine):
        import asyncio

        asyncio.run(value)
    elif isinstance(value, Generator | AsyncGenerator):
        raise TypeError("a test is a generator")


def finished(method: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A method of a plain unittest.TestCase, awaited; unittest itself would not."""
    return lambda self: finish(method(self))


def hook(owner: Any, name: str, *arguments: Any) -> None:
    """Calls an optional method of a test class with as many arguments as it takes."""
    if (found := getattr(owner, name, None)) is not None:
        finish(found(*arguments[: found.__code__.co_argcount - 1]))


def takes_arguments(function: Callable[..., Any]) -> bool:
    """True for helpers: tests take no arguments."""
    return isinstance(function, FunctionType) and function.__code__.co_argcount > len(function.__defaults__ or ())
