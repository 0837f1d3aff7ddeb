"""The package stays small: a budget of code lines for each folder, without docstrings, comments and blank lines.
docs/adr/0020-a-budget-of-lines.md says how it is raised."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

from tests.structure.trees import tree_of

pytestmark = pytest.mark.structure

PACKAGE = Path(__file__).resolve().parents[2] / "asyncrl"
BUDGET = {
    "algorithms": 758,
    "audit": 1095,
    "checkpoint": 670,
    "cluster": 1000,
    "commands": 1695,
    "config": 2663,
    "data": 1535,
    "doctor": 525,
    "driver": 2598,
    "environments": 2190,
    "evaluation": 80,
    "inference": 8149,
    "kernels": 60,
    "observability": 880,
    "plan": 927,
    "publish": 374,
    "queue": 1440,
    "remote": 615,
    "rewards": 1405,
    "rollout": 2107,
    "report": 620,
    "root": 190,
    "sandbox": 690,
    "serving": 2890,
    "trainer": 5635,
    "types": 1240,
    "weights": 3235,
    "workers": 520,
}
"""Folder -> code lines. `root`: the modules beside the folders."""
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


def test_every_folder_keeps_its_budget():
    found = dict.fromkeys(BUDGET, 0)
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE).parts
        folder = inside[0] if len(inside) > 1 else "root"
        found[folder] = found.get(folder, 0) + code_lines(path.read_text())
    over = {name: (lines, BUDGET.get(name, 0)) for name, lines in found.items() if lines > BUDGET.get(name, 0)}
    assert not over, f"(lines, budget): {over}; look what can go, or raise the budget by a decision record"
    slack = {name: (lines, BUDGET[name]) for name, lines in found.items() if lines < 0.9 * BUDGET[name]}
    assert not slack, f"(lines, budget): {slack}; lower the budget: what was saved stays saved"
