"""Environments by name. They turn a prompt into a trajectory; tools and the agent endpoint are among them.

Runs in: rollouter.

Importing the package imports no environment, since tool processes import it and start often.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from asyncrl.environments.custom import make_custom, require_environment
from asyncrl.registry import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from asyncrl.config.recipe import Recipe
    from asyncrl.config.rollout import RolloutConfig
    from asyncrl.data.chat import Chat
    from asyncrl.data.tool_calls import ToolPrompt
    from asyncrl.environments.environment import Environment, Managed, Session, Task


def _named(path: str) -> Any:
    """`module:Name` of this package, imported when it is needed: the packages behind some are optional."""
    return resolve_name(f"{__name__}.{path}")


ENVIRONMENTS: dict[str, Callable[[Recipe, Chat], Environment]] = {
    "single_turn": lambda recipe, chat: _named("environment:SingleTurn")(),
    "tool_use": lambda recipe, chat: _named("tool_use:ToolUse")(recipe, chat),
    "interleaved_tool_use": lambda recipe, chat: _named("interleaved_tool_use:InterleavedToolUse")(recipe),
    "agent": lambda recipe, chat: _named("agent:AgentEnvironment")(recipe, chat),
    "gymnasium": lambda recipe, chat: _named("gymnasium_environment:GymnasiumEnvironment")(recipe),
    "openenv": lambda recipe, chat: _named("openenv_environment:OpenEnvEnvironment")(recipe),
    "verifiers": lambda recipe, chat: _named("verifiers_environment:VerifiersEnvironment")(recipe, chat),
    "nemo_gym": lambda recipe, chat: _named("nemo_gym_environment:NemoGymEnvironment")(recipe, chat),
}

_CHECKS: dict[str, Callable[[RolloutConfig], object]] = {
    "tool_use": lambda rollout: _named("toolbox:check_tools")(rollout.tool_use),
    "interleaved_tool_use": lambda rollout: _named("toolbox:check_tools")(rollout.tool_use),
    "agent": lambda rollout: _named("agent:load_agent")(rollout.agent),
    "gymnasium": lambda rollout: _named("gymnasium_environment:check_gymnasium")(rollout.gymnasium),
    "openenv": lambda rollout: _named("openenv_environment:check_openenv")(rollout.openenv),
    "verifiers": lambda rollout: _named("verifiers_environment:load_checked")(rollout.verifiers),
    "nemo_gym": lambda rollout: _named("nemo_gym_environment:agents_of")(rollout),
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
    if name in _CHECKS:
        _CHECKS[name](recipe.rollout)
    elif name not in ENVIRONMENTS:
        from asyncrl.config.recipe import require_taught

        require_taught(recipe, bool(getattr(_custom(name, made), "judges", False)))


def _custom(name: str, made: Callable[[], Any]) -> Environment:
    built = make_custom(f"rollout.environment={name}", made)
    require_environment(name, built)
    return built


def prompt_tools(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> ToolPrompt | None:
    """The tools that every prompt of the recipe describes; None without tools. Blocks on requests to MCP servers.
    Raises ConfigError."""
    if recipe.rollout.environment == "interleaved_tool_use":
        return _named("interleaved_tool_use:interleaved_prompt")(recipe, tokenizer)
    if recipe.rollout.environment != "tool_use":
        return None
    from asyncrl.data.tool_calls import template_text

    return _named("tool_use:tool_prompt")(recipe.rollout.tool_use, template_text(tokenizer))


_HOMES = {"Chat": "asyncrl.data.chat"} | dict.fromkeys(
    ("Environment", "Managed", "Session", "Task"), f"{__name__}.environment"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(f"{_HOMES[name]}:{name}")
