"""Records out of the plain values that JSON holds, every field checked: a file may hold anything."""

from __future__ import annotations

import functools
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def from_plain(kind: Any, value: Any, at: str = "") -> Any:
    """`value` as a `kind`: a dataclass, tuple, `Literal`, optional, int, float, str or bool.

    Args:
        at: the place of `value`, for messages.

    Raises:
        ValueError: it is none, or a field of it is missing, unknown or of another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record(kind, value, at)
    if origin in (Union, UnionType):
        of = next(each for each in inner if each is not NoneType)
        return None if value is None else from_plain(of, value, at)
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{at or 'it'} is {value!r:.60}, none of {', '.join(map(str, inner))}")
        return value
    if origin is tuple:
        items = value if isinstance(value, list) else _wrong(at, "list", value)
        kinds = [inner[0]] * len(items) if inner[-1] is Ellipsis else list(inner)
        if len(items) != len(kinds):
            raise ValueError(f"{at or 'it'} has {len(items)} items, not {len(kinds)}")
        return tuple(from_plain(of, item, f"{at}[{i}]") for i, (of, item) in enumerate(zip(kinds, items, strict=True)))
    if type(value) is not kind and not (kind is float and type(value) is int):
        _wrong(at, kind.__name__, value)
    return value


def _record(kind: Any, value: Any, at: str) -> Any:
    if not isinstance(value, dict):
        _wrong(at, "object", value)
    hints, required = _schema(kind)
    prefix = f"{at}." if at else ""
    if missing := sorted(required - value.keys()):
        raise ValueError(f"{prefix}{missing[0]} is missing")
    if unknown := sorted(value.keys() - hints.keys()):
        raise ValueError(f"{prefix}{unknown[0]} is unknown")
    return kind(**{name: from_plain(hints[name], each, prefix + name) for name, each in value.items()})


@functools.cache
def _schema(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """The type of each field; the fields without a default."""
    required = (f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    return get_type_hints(kind), frozenset(required)


def _wrong(at: str, due: str, value: Any) -> Any:
    raise ValueError(f"{at or 'it'} is a {type(value).__name__} where {due} is due")
