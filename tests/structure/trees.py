"""Syntax trees of source files."""

import ast


def tree_of(source: str) -> ast.Module:
    """CPython 3.11 sometimes takes its own depth for wrong, and says so by SystemError (its issue 106905)."""
    for _ in range(5):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
