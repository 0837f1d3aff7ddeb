"""Looks up a part by name, or by the documented escape hatch `package.module:Name`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from asyncrl.errors import ConfigError, explain

T = TypeVar("T")


def make_importable() -> None:
    """Makes modules in the working directory importable, as `python -m` does, for users' rewards and environments. Call
    it before reading a recipe."""
    if (directory := os.getcwd()) not in sys.path:
        sys.path.insert(0, directory)


def resolve(key: str, name: str, known: Mapping[str, T]) -> T | Any:
    """The entry `name` of `known`, or the attribute `package.module:Name`.

    Raises ConfigError naming the recipe's `key`: unknown (with the closest known name), or not importable.
    """
    if name in known:
        return known[name]
    if ":" in name:
        module_name, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # a module may call sys.exit
            do = "name an importable `package.module:Name`, in the working directory or on PYTHONPATH"
            raise ConfigError(explain(f"{key}={name}", f"cannot import it: {type(e).__name__}: {e}", do)) from e
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    do = f"{hint}Choose one, or `package.module:Name`"
    raise ConfigError(explain(f"{key}={name}", f"known names are {sorted(known)}", do))
