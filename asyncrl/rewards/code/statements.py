"""Tests that are Python code: finds the checks in them, and refuses tests that cannot judge a program.

A check is an assertion (a statement, or a call of a function `assert*`), a `with` of `raises` or `assert*`, an `if`
that raises, or a `try` that fails if nothing was raised. Each check reports that it ran; a program passes only if a
check ran. Pure. Tests come from the dataset and are trusted.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import marshal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from asyncrl.errors import explain
from asyncrl.rewards.code.harness import ALIASES, BUILTINS, JUDGED, MODULES, free_names

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPS = {"skip", "skipIf", "skipUnless", "skipif", "skipTest", "xfail", "expectedFailure", "importorskip"}
_NEEDS_PYTEST = {"fixture", "parametrize", "usefixtures", "given"}
_HOOKS = {f"{when}_{what}" for when in ("setup", "teardown") for what in ("module", "function")} | {"load_tests"}
_WRAPPERS = frozenset(
    "set list tuple dict frozenset sorted str repr bool int float round abs len all any max min map zip range "  # noqa: SIM905
    "enumerate isinstance type print".split()
)
_GENERATOR_FLAGS = 0x20 | 0x200


@dataclass(frozen=True, slots=True)
class Statements:
    """`code`: compiled, marshalled, base64. `names`: the program's names that the tests use. `modules`: those that the
    tests use without an import."""

    code: str
    entry_point: str
    names: frozenset[str]
    modules: frozenset[str]


@lru_cache(maxsize=64)  # the responses of a group share their tests
def read_statements(text: str, entry_point: str, asked: str) -> Statements:
    """Raises ValueError: not Python, no check can run, or it needs unsupported parts of pytest."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text, "tests")
            names = _taken_names(text, tree, entry_point)
            refusal = _refusal(tree, entry_point, names)
            _insert_reports(tree.body, _runners(tree))
            code = compile(tree, "tests", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ValueError(explain(asked, found, "write Python, or inputs and outputs")) from error
    if any(c.co_name.startswith("test") and c.co_flags & _GENERATOR_FLAGS for c in _code_objects(code)):
        refusal = "a test is a generator: nothing would run it", "write tests without yield"
    if refusal is not None:
        raise ValueError(explain(asked, *refusal))
    return Statements(
        base64.b64encode(marshal.dumps(code)).decode(), entry_point, names, frozenset(free_names(text)) & {*MODULES}
    )


def _taken_names(text: str, tree: ast.Module, entry_point: str) -> frozenset[str]:
    """A builtin, or a module whose attributes are used, is the program's only where the tests say so or name nothing
    else that it could define; then wrappers such as `sorted` are its own only if there is nothing else either."""
    nodes = list(ast.walk(tree))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    modules = {*MODULES} - called
    free = {name for name in free_names(text) if not name.startswith("__")}
    names = free - modules - BUILTINS | free_names(entry_point)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in ALIASES:
            names |= {alias.name for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.Import) and any(alias.name in ALIASES for alias in node.names):
            names |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    names = {name for name in names if not name.startswith("__")}
    return frozenset(names or free - modules - _WRAPPERS or free - modules)


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _code_objects(inner)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refusal(tree: ast.Module, entry_point: str, names: frozenset[str]) -> tuple[str, str] | None:
    """(found, do) if these tests cannot judge a program, else None."""
    nodes = list(ast.walk(tree))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    mentioned = attributes | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    decorators = {_name(d) for node in nodes for d in getattr(node, "decorator_list", ())}
    # Tests that would be skipped, or never called, must not pass a program.
    for module in _imported(tree):
        if not _exists(module):
            return f"they import {module}, which is not installed", "install it, or write tests without it"
    if used := (attributes | decorators) & _SKIPS:
        return f"a test may be skipped ({min(used)})", "leave out what is not to run"
    if used := ((attributes | decorators) & _NEEDS_PYTEST) | ({getattr(n, "name", "") for n in tree.body} & _HOOKS):
        return f"they need {min(used)}, which only pytest runs", "write out what it does"
    for function, num_given in _tests_of(tree):
        if _num_required(function) > num_given and function.name not in mentioned:
            return f"{function.name} takes arguments, which nobody gives it", "write tests without arguments"
    defined = {node.name: node for node in tree.body if isinstance(node, _FUNCTIONS)}
    if "check" in defined and not entry_point and "check" not in mentioned and _num_required(defined["check"]):
        return "check(candidate), and no extra_info.entry_point", "name the function that it checks there"
    if not any(_runs(node, mentioned, entry_point) and _holds_check(node) for node in tree.body):
        return "nothing in them that runs can fail", "write assert statements, or test functions with some"
    return None if names else ("they use no name that a program could define", "call what the program is to define")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@lru_cache(maxsize=1024)
def _exists(module: str) -> bool:
    root = module.partition(".")[0]
    return root in (*ALIASES, "__main__") or (bool(root) and importlib.util.find_spec(root) is not None)


def _tests_of(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Functions that pytest would call, with the number of arguments it passes."""
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) and not node.bases and node.name.startswith("Test") else []
        for function, num_given in ((node, 0), *((method, 1) for method in inside)):
            if isinstance(function, _FUNCTIONS) and function.name.startswith("test"):
                yield function, num_given


def _num_required(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    optional = len(arguments.defaults) + sum(default is not None for default in arguments.kw_defaults)
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - optional


def _runs(node: ast.stmt, mentioned: set[str], entry_point: str) -> bool:
    """True if a top-level statement may do more than define."""
    if isinstance(node, ast.ClassDef):
        return bool(node.bases) or node.name.startswith("Test") or node.name in mentioned
    if isinstance(node, _FUNCTIONS):
        is_test = node.name.startswith("test") or (node.name == "check" and bool(entry_point))
        return is_test or node.name in mentioned
    return True


def _holds_check(node: ast.stmt) -> bool:
    return any(isinstance(n, ast.stmt) and _is_check(n) for n in ast.walk(node))


# -- checks ------------------------------------------------------------------------------------------------------------


def _is_check(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assert():
            return True
        case ast.Expr(ast.Call() as call) | ast.Expr(ast.Await(ast.Call() as call)):
            return _name(call).startswith("assert")
        case ast.With() | ast.AsyncWith():
            return any(_name(item.context_expr).startswith(("assert", "raises", "warns")) for item in statement.items)
        case ast.If() | ast.Try() | ast.TryStar():
            return any(map(_fails, (*statement.body, *statement.orelse)))
    return False


def _fails(statement: ast.stmt) -> bool:
    """True if the statement fails whenever it runs."""
    match statement:
        case ast.Raise() | ast.Assert(ast.Constant(False | 0 | None)):
            return True
        case ast.Expr(ast.Call() as call):
            return _name(call) in ("fail", "exit", "_exit")
    return False


def _name(node: ast.expr) -> str:
    """The last part of a called or named expression."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _insert_reports(body: list[ast.stmt], runners: set[str]) -> None:
    """Makes each check report, and removes calls of other test runners, so that every test runs once."""
    whole: list[ast.stmt] = []
    for statement in body:
        is_check = _is_check(statement)
        for inner in _blocks(statement):
            _insert_reports(inner, runners)
        if isinstance(statement, ast.Expr) and any(
            isinstance(node, ast.Call) and ast.unparse(node.func) in runners for node in ast.walk(statement)
        ):
            statement = ast.copy_location(ast.Pass(), statement)
        whole.append(statement)
        if isinstance(statement, ast.Assert):
            statement.test = _report(statement.test)
        elif is_check:
            passed = ast.copy_location(ast.Constant(True), statement)
            whole.append(ast.copy_location(ast.Expr(_report(passed)), statement))
    body[:] = whole


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for holder in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(holder, field, None), list):
                yield block


def _report(value: ast.expr) -> ast.expr:
    function = ast.copy_location(ast.Name(JUDGED, ast.Load()), value)
    return ast.copy_location(ast.Call(function, [value], []), value)


def _runners(tree: ast.Module) -> set[str]:
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module in ("unittest", "pytest")]
    bare = {alias.asname or alias.name for node in froms for alias in node.names if alias.name == "main"}
    return bare | {"unittest.main", "pytest.main"}
