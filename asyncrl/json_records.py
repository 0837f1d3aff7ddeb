"""Builds records from the plain values of JSON, with every field checked: a file may contain anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from asyncrl.ranges import in_range, range_in_words

Reader = Callable[[Any, str], Any]
"""(value, its place for messages) -> the checked value."""


def from_plain(kind: Any, value: Any, at: str = "") -> Any:
    """`value` as a `kind`: a dataclass, tuple, mapping of texts, `Literal`, optional, int, float, str or bool; numbers
    may be `Annotated` with bounds (`asyncrl/ranges.py`).

    Args:
        at: the place of `value`, for messages.

    Raises:
        ValueError: `value` is not a `kind`, or a field of it is missing, unknown, of another type or out of range.
    """
    return _reader(kind)(value, at)


@functools.cache
def _reader(kind: Any) -> Reader:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record(kind)
    if origin is Annotated:
        return _in_range(_reader(inner[0]), inner[1:])
    if origin in (Union, UnionType):
        of = _reader(next(each for each in inner if each is not NoneType))
        return lambda value, at: None if value is None else of(value, at)
    if origin is Literal:
        return functools.partial(_choice, inner)
    if origin is tuple:
        return _items([_reader(each) for each in inner if each is not Ellipsis], fixed=inner[-1] is not Ellipsis)
    if origin is Mapping:
        return _values(_reader(inner[1]))
    return _plain((kind, int) if kind is float else (kind,))


def _plain(kinds: tuple[type, ...]) -> Reader:
    def read(value: Any, at: str) -> Any:
        return value if type(value) in kinds else _wrong(at, kinds[0].__name__, value)

    return read


def _in_range(number: Reader, bounds: tuple[Any, ...]) -> Reader:
    def read(value: Any, at: str) -> Any:
        value = number(value, at)
        if not in_range(value, bounds):
            raise ValueError(f"{at or 'it'} is {value!r:.60}, not finite and {range_in_words(bounds)}")
        return value

    return read


def _choice(choices: tuple[Any, ...], value: Any, at: str) -> Any:
    if value not in choices:
        raise ValueError(f"{at or 'it'} is {value!r:.60}, none of {', '.join(map(str, choices))}")
    return value


def _items(kinds: list[Reader], *, fixed: bool) -> Reader:
    def read(value: Any, at: str) -> Any:
        items = value if isinstance(value, list) else _wrong(at, "list", value)
        if fixed and len(items) != len(kinds):
            raise ValueError(f"{at or 'it'} has {len(items)} items, not {len(kinds)}")
        readers = kinds if fixed else kinds * len(items)
        return tuple(of(item, f"{at}[{i}]") for i, (of, item) in enumerate(zip(readers, items, strict=True)))

    return read


def _values(of: Reader) -> Reader:
    def read(value: Any, at: str) -> Any:
        held = value if isinstance(value, dict) else _wrong(at, "object", value)
        return {name: of(each, f"{at}.{name}") for name, each in held.items()}

    return read


def _record(kind: Any) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    readers = {f.name: _reader(hints[f.name]) for f in fields(kind)}

    def read(value: Any, at: str) -> Any:
        held = value if isinstance(value, dict) else _wrong(at, "object", value)
        prefix = f"{at}." if at else ""
        if not required <= held.keys():
            raise ValueError(f"{prefix}{min(required - held.keys())} is missing")
        if not held.keys() <= readers.keys():
            raise ValueError(f"{prefix}{min(held.keys() - readers.keys())} is unknown")
        return kind(**{name: readers[name](each, prefix + name) for name, each in held.items()})

    return read


def _wrong(at: str, due: str, value: Any) -> Any:
    raise ValueError(f"{at or 'it'} is a {type(value).__name__} where {due} is due")
