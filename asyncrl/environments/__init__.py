"""Environments by name. They turn a prompt into a trajectory; tools and the agent endpoint are among them.

Runs in: rollouter.

Importing the package imports no environment, since tool processes import it and start often.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrl.environments.custom import make_custom, require_environment
from asyncrl.registry import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from asyncrl.config.recipe import Recipe
    from asyncrl.data.chat import Chat
    from asyncrl.data.tool_calls import ToolPrompt
    from asyncrl.environments.environment import Environment, Managed, Session, Task


def _single_turn(recipe: Recipe, chat: Chat) -> Environment:
    from asyncrl.environments.environment import SingleTurn

    return SingleTurn()


def _tool_use(recipe: Recipe, chat: Chat) -> Environment:
    from asyncrl.environments.tool_use import ToolUse

    return ToolUse(recipe, chat)


def _interleaved_tool_use(recipe: Recipe, chat: Chat) -> Environment:
    from asyncrl.environments.interleaved_tool_use import InterleavedToolUse

    return InterleavedToolUse(recipe)


def _agent(recipe: Recipe, chat: Chat) -> Environment:
    from asyncrl.environments.agent import AgentEnvironment

    return AgentEnvironment(recipe, chat)


def _gymnasium(recipe: Recipe, chat: Chat) -> Environment:
    from asyncrl.environments.gymnasium_environment import GymnasiumEnvironment

    return GymnasiumEnvironment(recipe)


def _openenv(recipe: Recipe, chat: Chat) -> Environment:
    from asyncrl.environments.openenv_environment import OpenEnvEnvironment

    return OpenEnvEnvironment(recipe)


def _verifiers(recipe: Recipe, chat: Chat) -> Environment:
    from asyncrl.environments.verifiers_environment import VerifiersEnvironment

    return VerifiersEnvironment(recipe, chat)


ENVIRONMENTS: dict[str, Callable[[Recipe, Chat], Environment]] = {
    "single_turn": _single_turn,
    "tool_use": _tool_use,
    "interleaved_tool_use": _interleaved_tool_use,
    "agent": _agent,
    "gymnasium": _gymnasium,
    "openenv": _openenv,
    "verifiers": _verifiers,
}


def build_environment(recipe: Recipe, chat: Chat) -> Environment:
    """The environment that `rollout.environment` names. A custom one, `package.module:Name`, is called without
    arguments. A `Managed` environment must be started, and closed at the end.

    Raises ConfigError: unknown name, failed import or construction, no `run`, or settings that it cannot use.
    """
    name = recipe.rollout.environment
    made: Any = resolve("rollout.environment", name, ENVIRONMENTS)
    return made(recipe, chat) if name in ENVIRONMENTS else _custom(name, made)


def check_environment(recipe: Recipe) -> None:
    """Raises ConfigError as `build_environment`, and for a missing package; needs no tokenizer."""
    name = recipe.rollout.environment
    made: Any = resolve("rollout.environment", name, ENVIRONMENTS)
    # Each check is imported only if its environment is named: the packages behind them are optional.
    if name in ("tool_use", "interleaved_tool_use"):
        from asyncrl.environments.toolbox import check_tools

        check_tools(recipe.rollout.tool_use)
    elif name == "agent":
        from asyncrl.environments.agent import load_agent

        load_agent(recipe.rollout.agent)
    elif name == "gymnasium":
        from asyncrl.environments.gymnasium_environment import check_gymnasium

        check_gymnasium(recipe.rollout.gymnasium)
    elif name == "openenv":
        from asyncrl.environments.openenv_environment import check_openenv

        check_openenv(recipe.rollout.openenv)
    elif name == "verifiers":
        from asyncrl.environments.verifiers_environment import load_checked

        load_checked(recipe.rollout.verifiers)
    elif name not in ENVIRONMENTS:
        _custom(name, made)


def _custom(name: str, made: Callable[[], Any]) -> Environment:
    built = make_custom("rollout.environment", name, made)
    require_environment(name, built)
    return built


def prompt_tools(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> ToolPrompt | None:
    """The tools that every prompt of the recipe describes; None without tools. Blocks on requests to MCP servers.
    Raises ConfigError."""
    if recipe.rollout.environment == "interleaved_tool_use":
        from asyncrl.environments.interleaved_tool_use import interleaved_prompt

        return interleaved_prompt(recipe, tokenizer)
    if recipe.rollout.environment != "tool_use":
        return None
    from asyncrl.data.tool_calls import template_text
    from asyncrl.environments.tool_use import tool_prompt

    return tool_prompt(recipe.rollout.tool_use, template_text(tokenizer))


_HOMES = {"Chat": "asyncrl.data.chat"} | dict.fromkeys(
    ("Environment", "Managed", "Session", "Task"), f"{__name__}.environment"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


__all__ = [
    "ENVIRONMENTS",
    "Chat",
    "Environment",
    "Managed",
    "Session",
    "Task",
    "build_environment",
    "check_environment",
    "prompt_tools",
]
