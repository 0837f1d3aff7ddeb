"""Syntax trees of source files."""

import ast
import functools


@functools.cache
def tree_of(source: str) -> ast.Module:
    """Parsed once for all tests, which only read it. CPython 3.11 sometimes misjudges its own depth, and raises
    SystemError (its issue 106905)."""
    for _ in range(5):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
