"""Builds environments and tools that users wrote."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from asyncrl.errors import ConfigError, explain


def make_custom(key: str, name: str, made: Callable[[], Any]) -> Any:
    """What `package.module:Name` gives when it is called. Raises ConfigError: whatever that raised."""
    try:
        return made()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a class may call sys.exit
        found = f"making it raised {type(error).__name__}: {error}"
        do = "name a class that can be called without arguments"
        raise ConfigError(explain(f"{key}={name}", found, do)) from error


def require_environment(name: str, built: Any) -> None:
    """Raises ConfigError: it has no method `run(task, session)`."""
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
