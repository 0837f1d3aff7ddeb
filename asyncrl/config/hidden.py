"""Replaces values from the environment, often secrets, by their interpolations in all output."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import ConfigError, explain

MIN_LENGTH = 8
"""Shorter values are not replaced in texts: they would match unrelated words."""
_ANY = re.compile(r"oc\.env\b")
_NAME = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)")


@dataclass(frozen=True, slots=True)
class Hidden:
    """`values`: value -> its interpolation, such as ${oc.env:NAME}."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def named(cls, names: Collection[str], environment: Mapping[str, str]) -> Hidden:
        """The values of these variables in `environment`."""
        return cls({value: f"${{oc.env:{name}}}" for name in sorted(names) if (value := environment.get(name))})

    @property
    def names(self) -> list[str]:
        """The variables."""
        return [name for written in self.values.values() for name in names_in(written)]

    def __call__(self, text: str) -> str:
        """`text`, plain or JSON, with values replaced by their interpolations."""
        # Longest first: a value may be part of another one.
        for value in sorted(self.values, key=len, reverse=True):
            if len(value) >= MIN_LENGTH:
                for form in (value, *(encode(value)[1:-1] for encode in (json.dumps, repr))):
                    text = text.replace(form, self.values[value])
        return text

    def as_written(self, raw: Any, resolved: Any) -> Any:
        """`resolved` with texts that contain environment values taken from `raw`, its unresolved form. Numbers stay:
        programs read them."""
        if isinstance(resolved, Mapping):
            inner = raw if isinstance(raw, Mapping) else {}
            return {key: self.as_written(inner.get(key), value) for key, value in resolved.items()}
        if isinstance(resolved, list):
            inner = raw if isinstance(raw, list) and len(raw) == len(resolved) else [None] * len(resolved)
            return [self.as_written(*pair) for pair in zip(inner, resolved, strict=True)]
        if isinstance(resolved, str) and any(value in resolved for value in self.values):
            return raw if isinstance(raw, str) and "${" in raw else self(resolved)
        return resolved


def names_in(raw: Any) -> set[str]:
    """Environment variables in interpolations of `raw`. Raises ConfigError: a name is computed, so the values to hide
    are unknown."""
    if isinstance(raw, Mapping):
        return set().union(*(names_in(key) | names_in(value) for key, value in raw.items()))
    if isinstance(raw, list):
        return set().union(*map(names_in, raw))
    if not isinstance(raw, str) or "${" not in raw:
        return set()
    names = _NAME.findall(raw)
    if len(names) != len(_ANY.findall(raw)):
        raise ConfigError(explain(raw, "the name of the environment variable is not in it", "write ${oc.env:NAME}"))
    return set(names)
