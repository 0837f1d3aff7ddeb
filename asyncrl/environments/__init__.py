"""Environments by name."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.environments.environment import Environment, Session, Task
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.registry import resolve

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {"single_turn": SingleTurn}


def build_environment(name: str) -> Environment:
    """Raises ConfigError: unknown name, or a `package.module:Name` that cannot be imported."""
    return resolve("rollout.environment", name, ENVIRONMENTS)()


__all__ = ["ENVIRONMENTS", "Environment", "Session", "Task", "build_environment"]
