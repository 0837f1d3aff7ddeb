"""Reads JSON, and builds records from its plain values with every field checked: a file may contain anything."""

from __future__ import annotations

import functools
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from asyncrl.errors import writing
from asyncrl.ranges import in_range, range_in_words

LARGEST = 1e100
"""Larger numbers in a file measure nothing, and sums of them overflow."""
Reader = Callable[[Any, str], Any]
"""(value, its place for messages) -> the checked value."""


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text that may hold anything. Raises ValueError.

    A number that is not finite, over LARGEST or over 64 bits becomes None; what is no character, a question mark.
    """
    text = text.decode("utf-8-sig", errors="replace") if isinstance(text, bytes) else text
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_float=_number, parse_int=_whole)
        if "\\ud" in text.lower():  # half of a surrogate pair, perhaps, which nothing can write or print
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        return value
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is; None if it is none. Numbers are Python's own."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _number(digits: str) -> float | None:
    return value if abs(value := float(digits)) <= LARGEST else None


def _whole(digits: str) -> int | None:
    return value if len(digits) <= 20 and -(2**63) <= (value := int(digits)) < 2**64 else None


def write_json(value: Any, **options: Any) -> str:
    """As `json.dumps`, with null for numbers that are not finite, which JSON cannot express."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), **options)


def append_line(path: Path, line: str) -> None:
    """Appends a line in one write, so that lines of several processes never mix. Raises StorageError, also for a pipe,
    which could block for ever."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644), "wb", 0) as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise OSError("it is a pipe")
            data = f"{line}\n".encode()
            if (written := file.write(data)) != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")


def replace_file(path: Path, content: bytes) -> None:
    """Writes the file so that readers, also after a crash, find the old content or the new one. Raises StorageError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise


def sync(path: Path) -> None:
    """Returns when the file, or the entries of the directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


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
    if kind is Any:
        return lambda value, at: value
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
