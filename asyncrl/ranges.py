"""Numbers that declare their range at the field: keys of a recipe, and records that are read back from files.

Every range holds finite numbers only.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
Whole = Annotated[int, Ge(0), Lt(2**63)]
"""A whole number that fits into an int64."""
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


def is_finite(value: float) -> bool:
    """Also False for integers beyond the floats, where `math.isfinite` raises."""
    return abs(value) <= sys.float_info.max


def in_range(value: float, bounds: Iterable[Any]) -> bool:
    """True for a finite number within all bounds."""
    for bound in bounds:
        name, compare, _ = _BOUNDS[type(bound)]
        if not compare(value, getattr(bound, name)):
            return False
    return is_finite(value)


def range_in_words(bounds: Iterable[Any]) -> str:
    """For people: at least 0 and below 1."""
    return " and ".join(f"{_BOUNDS[type(b)][2]} {getattr(b, _BOUNDS[type(b)][0])}" for b in bounds)


def bounds_of(kind: Any) -> tuple[Any, ...]:
    """The bounds in a type, optional or not."""
    if get_origin(kind) is Annotated:
        return tuple(bound for bound in kind.__metadata__ if type(bound) in _BOUNDS)
    return next((found for part in get_args(kind) if get_origin(part) is Annotated and (found := bounds_of(part))), ())
