"""Exact arithmetic."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from asyncrl.environments.tools.tool import one_text

MAX_EXPRESSION_CHARS = 1000
MAX_BITS = 4096
"""Largest size of an intermediate number, so that a power of powers is refused immediately."""

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class Calculator:
    """Evaluates + - * / // % ** and parentheses over rational numbers."""

    name = "calculator"
    description = "Evaluates an arithmetic expression exactly."
    parameters = one_text("expression", "such as (12 + 3) * 4 / 5")

    def call(self, expression: str) -> str:
        """An integer, else a fraction and its decimal value. Raises ValueError, ZeroDivisionError."""
        expression = str(expression)
        if len(expression) > MAX_EXPRESSION_CHARS:
            raise ValueError(f"an expression has at most {MAX_EXPRESSION_CHARS} characters")
        try:
            tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"not an arithmetic expression: {expression!r}") from None
        value = _value(tree.body)
        if value.denominator == 1:
            return str(value.numerator)
        return f"{value.numerator}/{value.denominator} = {_decimal(value)}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(repr(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if (made := _OPERATORS.get(type(node.op))) is not None:
            return _bounded(made(left, right))
    raise ValueError("only numbers, + - * / // % ** and parentheses are known")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent must be an integer")
    if max(_bits(base), 1) * abs(exponent.numerator) > MAX_BITS:
        raise ValueError("the number is too large")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _decimal(value: Fraction) -> str:
    try:
        return f"{float(value):.10g}"
    except OverflowError:
        return "out of range"
