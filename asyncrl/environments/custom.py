"""Environments and tools of others: builds what users wrote, and names the packages that third-party environments need.

Light: tool and gymnasium processes import it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from packaging.specifiers import SpecifierSet

from asyncrl.errors import ConfigError, explain


def make_custom(
    asked: str, made: Callable[[], Any], do: str = "name a class that can be called without arguments"
) -> Any:
    """The result of calling what others wrote. Raises ConfigError for any error of the call."""
    try:
        return made()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a class may call sys.exit
        raise ConfigError(explain(asked, f"making it raised {type(error).__name__}: {error}", do)) from error


def require_environment(name: str, built: Any) -> None:
    """Raises ConfigError: `built` has no method `run(task, session)`."""
    run: Any = getattr(built, "run", None)
    found = "" if callable(run) else "it has no method run"
    if not found:
        try:
            inspect.signature(run).bind(None, None)
        except (TypeError, ValueError) as error:
            found = f"its run cannot be called with a task and a session: {error}"
    if found:
        do = "write async def run(self, task, session) -> Trajectory"
        raise ConfigError(explain(f"rollout.environment={name}", found, do))


# Packages behind third-party environments, needed only if a recipe names one.


PACKAGES = {
    "gymnasium": ("rollout.environment=gymnasium", "gymnasium", ">=1.0,<2"),
    "mcp": ("rollout.tool_use.mcp", "mcp", ">=2.0,<3"),
    "openenv": ("rollout.environment=openenv", "openenv", ">=0.4,<1"),
    "verifiers": ("rollout.environment=verifiers", "verifiers", ">=0.4,<0.5"),
}
"""Module (equal to its package) -> the recipe's feature that needs it, the extra of asyncrl that installs it, its
versions."""


def require_package_of(module: str) -> None:
    """Raises ConfigError: the package is not installed, or its version does not fit."""
    asked, extra, versions = PACKAGES[module]
    found = None if importlib.util.find_spec(module) else f"the package {module} is not installed"
    with suppress(importlib.metadata.PackageNotFoundError):  # imported from source: the version is unknown
        installed = importlib.metadata.version(module)
        if not SpecifierSet(versions).contains(installed, prereleases=True):
            found = found or f"{module} {installed}, needed {versions}"
    if found:
        raise ConfigError(explain(asked, found, f"pip install 'asyncrl[{extra}]'"))
