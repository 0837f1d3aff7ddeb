"""The checks that config sections share; each raises ConfigError in the three-part form.

A range stands at its field, as an annotation, and `check_ranges` holds a section to those of its fields.
"""

from __future__ import annotations

import math
import operator
import re
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from asyncrl.errors import ConfigError, explain

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]

_BOUNDS = {
    Ge: ("ge", operator.ge, "at least"),
    Gt: ("gt", operator.gt, "above"),
    Le: ("le", operator.le, "at most"),
    Lt: ("lt", operator.lt, "below"),
}


def require(condition: bool, *, asked: str, found: str, do: str) -> None:
    if not condition:
        raise ConfigError(explain(asked, found, do))


def check_ranges(prefix: str, section: Any) -> None:
    """Holds the numbers of a section to the ranges that its fields declare, and to finite ones. None passes.

    Args:
        prefix: stands before the name of a field in messages: "trainer.", or "--" for options of a command.
    """
    for name, bounds in _bounded_fields(type(section)).items():
        value = getattr(section, name)
        if value is not None and not (math.isfinite(value) and all(_holds(value, bound) for bound in bounds)):
            key = prefix + (name.replace("_", "-") if prefix == "--" else name)
            words = range_in_words(bounds)
            do = f"set {key} to a finite number that is {words}"
            found = f"{key} must be {words if math.isfinite(value) else 'finite'}"
            raise ConfigError(explain(f"{key}={value}", found, do))


def range_in_words(bounds: tuple[Any, ...]) -> str:
    """For people: at least 0 and below 1."""
    return " and ".join(f"{_BOUNDS[type(b)][2]} {getattr(b, _BOUNDS[type(b)][0])}" for b in bounds)


def bounds_of(kind: Any) -> tuple[Any, ...]:
    """The bounds in a type, be it optional."""
    if get_origin(kind) is Annotated:
        return tuple(bound for bound in kind.__metadata__ if type(bound) in _BOUNDS)
    return next((found for part in get_args(kind) if get_origin(part) is Annotated and (found := bounds_of(part))), ())


def _holds(value: float, bound: Any) -> bool:
    name, compare, _ = _BOUNDS[type(bound)]
    return compare(value, getattr(bound, name))


@cache
def _bounded_fields(schema: type) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(schema, include_extras=True)
    return {name: bounds for name, kind in hints.items() if (bounds := bounds_of(kind))}


def require_device(key: str, value: str) -> None:
    """auto, or what torch names a device: cpu, cuda, cuda:0."""
    require(
        re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value) is not None,
        asked=f"{key}={value}",
        found="no device that a model can run on",
        do=f"set {key} to auto, cpu, cuda or cuda:N",
    )


def require_temperature(key: str, value: float) -> None:
    require(
        value == 0 or 0.01 <= value <= 2,
        asked=f"{key}={value}",
        found="engines sample at 0 (greedy) or from 0.01 to 2",
        do=f"set {key} within these",
    )
