"""Tools by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config.environments import ToolUseConfig
from asyncrl.environments.custom import make_custom
from asyncrl.environments.tools.calculator import Calculator
from asyncrl.environments.tools.python import Python
from asyncrl.environments.tools.search import Search
from asyncrl.environments.tools.tool import Tool, schema_of
from asyncrl.errors import ConfigError, explain
from asyncrl.registry import resolve

TOOLS: dict[str, Callable[[ToolUseConfig], Tool]] = {
    "calculator": lambda config: Calculator(),
    "python": lambda config: Python(config.tool_timeout_s, allow_basic_sandbox=config.allow_basic_sandbox),
    "search": lambda config: Search(config.corpus or ""),
}


def build_tools(config: ToolUseConfig) -> tuple[Tool, ...]:
    """The tools of `rollout.tool_use.tools`; a custom one, `package.module:Name`, is called without arguments.

    Raises ConfigError: unknown name, failed import or construction, not a tool, or two tools with one name.
    """
    tools: list[Tool] = []
    for name in config.tools:
        made: Any = resolve("rollout.tool_use.tools", name, TOOLS)
        tool: Tool = made(config) if name in TOOLS else make_custom(f"rollout.tool_use.tools={name}", made)
        _require_tool(name, tool)
        if tool.name in {t.name for t in tools}:
            do = "name each tool once"
            raise ConfigError(explain(f"rollout.tool_use.tools={config.tools}", f"two are called {tool.name}", do))
        tools.append(tool)
    return tuple(tools)


def _require_tool(name: str, tool: Any) -> None:
    parts = ("name", "description", "parameters", "call")
    missing = [part for part in parts if not hasattr(tool, part)]
    found = f"it has no {', '.join(missing)}" if missing else ""
    if not missing and not re.fullmatch(r"\w+", str(tool.name)):
        found = f"its name {tool.name!r} is not letters, digits and underscores"
    if not missing and not isinstance(tool.parameters, Mapping):
        found = "its parameters are no JSON schema"
    if not missing and not callable(tool.call):
        found = "its call is no method"
    if found:
        do = "write what asyncrl.environments.tools.Tool says"
        raise ConfigError(explain(f"rollout.tool_use.tools: {name}", found, do))


__all__ = ["TOOLS", "Tool", "build_tools", "schema_of"]
