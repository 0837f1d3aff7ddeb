"""One budget each for code lines (without docstrings, comments and blank lines), files, protocols and refusals.
docs/adr/0020-a-budget-of-lines.md says why, and what an addition may cost."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.structure.trees import tree_of

PACKAGE = ROOT / "asyncrl"
LINES = 46_000
LINES_OF_TESTS = 42_750
FILES = 433
PROTOCOLS = 27
REFUSALS = 155
"""Limits of what is there. They only fall; what an addition may cost, docs/adr/0020-a-budget-of-lines.md says."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Lines with a token that is neither layout nor part of a string that stands alone."""
    words = set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - words)


def test_what_counts_as_code():
    source = '"""Words\nand more."""\n\nx = 1  # a remark\n# another\ny = """two\nlines"""\n"""What y is."""\n'
    assert code_lines(source) == 3


def sources(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.rglob("*.py")]


def calls_of(sources: list[str], *names: str) -> int:
    trees = (tree_of(source) for source in sources)
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        for tree in trees
        for node in ast.walk(tree)
    )


def subclasses_of(sources: list[str], name: str) -> int:
    trees = (tree_of(source) for source in sources)
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sum(ast.unparse(base).partition("[")[0] == name for node in classes for base in node.bases)


@pytest.mark.parametrize(
    ("what", "limit", "count"),
    [
        ("code lines of asyncrl", LINES, lambda: sum(map(code_lines, sources(PACKAGE)))),
        ("code lines of tests", LINES_OF_TESTS, lambda: sum(map(code_lines, sources(ROOT / "tests")))),
        ("files of asyncrl", FILES, lambda: len(sources(PACKAGE))),
        ("protocols of asyncrl", PROTOCOLS, lambda: subclasses_of(sources(PACKAGE), "Protocol")),
        ("refusals of config", REFUSALS, lambda: calls_of(sources(PACKAGE / "config"), "require", "ConfigError")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_budget_is_kept(what, limit, count):
    found = count()
    assert found <= limit, f"{found} {what}, {limit} allowed: delete first (docs/adr/0020-a-budget-of-lines.md)"
    assert found >= 0.98 * limit, f"{found} {what}: lower the limit from {limit}, so that what was saved stays saved"
