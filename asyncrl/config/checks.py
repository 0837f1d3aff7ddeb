"""The checks that config sections share; each raises ConfigError with a message of `explain`.

The range of a field is an annotation of the field (`asyncrl/ranges.py`). `section` has all fields of a section checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform, get_type_hints

from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import bounds_of, in_range, is_finite, range_in_words

T = TypeVar("T")


def require(condition: bool, *, asked: str, found: str, do: str) -> None:
    """Raises ConfigError unless `condition` holds. For short texts: they are made even where it holds."""
    if not condition:
        raise ConfigError(explain(asked, found, do))


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def section(prefix: str) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen dataclass. `check_ranges` comes before its own `__post_init__`, which may rely on it."""

    def made(schema: type[T]) -> type[T]:
        check_more = getattr(schema, "__post_init__", lambda self: None)

        def check(self: T) -> None:
            check_ranges(prefix, self)
            check_more(self)

        schema.__post_init__ = check  # type: ignore[attr-defined]
        return dataclass(frozen=True, slots=True, kw_only=True)(schema)

    return made


def check_ranges(prefix: str, section: Any) -> None:
    """Checks that a section's numbers are finite and in the ranges declared by its fields. None passes.

    Args:
        prefix: prefix of field names in messages: "trainer.", or "--" for options of a command.
    """
    for name, bounds in _bounded_fields(type(section)).items():
        value = getattr(section, name)
        if value is not None and not in_range(value, bounds):
            key = prefix + (name.replace("_", "-") if prefix == "--" else name)
            words = range_in_words(bounds)
            do = f"set {key} to a finite number that is {words}"
            found = f"{key} must be {words if is_finite(value) else 'finite'}"
            raise ConfigError(explain(f"{key}={value}", found, do))


@cache
def _bounded_fields(schema: type) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(schema, include_extras=True)
    return {name: bounds for name, kind in hints.items() if (bounds := bounds_of(kind))}


def require_device(key: str, value: str) -> None:
    """Raises ConfigError: neither auto nor a device such as cpu, cuda, cuda:0."""
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value) is None:
        do = f"set {key} to auto, cpu, cuda or cuda:N"
        raise ConfigError(explain(f"{key}={value}", "no device that a model can run on", do))


DEVICES = Path("/dev")
HIDDEN_GPUS = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs; the last one is Slurm's."""


def has_nvidia_gpu() -> bool:
    """True if this process may use an NVIDIA GPU, whether torch can or not. Containers have nvidiactl also where all
    GPUs are hidden."""
    return any(DEVICES.glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") not in HIDDEN_GPUS


def require_cuda(key: str, value: str, *, is_available: bool) -> None:
    """`is_available`: `torch.cuda.is_available()`, in the process that needs it."""
    if not is_available:
        found = "torch sees no CUDA device here: it is built without CUDA, or the NVIDIA driver is too old for it"
        do = f"run `python -c 'import torch; torch.zeros(1).cuda()'` on this machine, or set {key}=cpu"
        raise ConfigError(explain(f"{key}={value}, on the GPU that the run has for this process", found, do))


def require_url(key: str, url: str, *, schemes: tuple[str, ...] = ("http", "https")) -> None:
    """Raises ConfigError: not empty, and no address of a server."""
    if url and not url.startswith(tuple(f"{scheme}://" for scheme in schemes)):
        do = f"write {schemes[0]}://HOST:PORT, with a path where it has one"
        raise ConfigError(explain(f"{key}={url}", f"no address of a server ({', '.join(schemes)})", do))


def require_at_most_one(section: str, **settings: Any) -> None:
    """Raises ConfigError: two settings are given, and each stands for the other."""
    if sum(map(bool, settings.values())) > 1:
        asked = " and ".join(f"{section}.{key}={value}" for key, value in settings.items())
        raise ConfigError(explain(asked, "they exclude each other", "set one of them"))


def require_one_group(key: str, pattern: str) -> None:
    """Raises ConfigError: no regular expression with exactly one group."""
    try:
        groups = re.compile(pattern).groups
        found = f"it has {groups} groups"
    except re.error as error:
        groups, found = 0, f"no regular expression: {error}"
    if groups != 1:
        raise ConfigError(explain(f"{key}={pattern!r}", found, "write one with one group, such as 'Verdict: (yes|no)'"))


def require_stop_text(key: str, text: str) -> None:
    """Raises ConfigError: no end of a response can be found by this text."""
    if not (text and "\ufffd" not in text and text.encode(errors="replace").decode() == text):
        found = "no text of a response contains it" if text else "an empty text, which every response contains"
        do = "choose texts of at least one character, without U+FFFD and unpaired surrogates"
        raise ConfigError(explain(f"{key}={text!r}", found, do))


def require_temperature(key: str, value: float) -> None:
    if value != 0 and not 0.01 <= value <= 2:
        do = f"set {key} within these"
        raise ConfigError(explain(f"{key}={value}", "engines sample at 0 (greedy) or from 0.01 to 2", do))
