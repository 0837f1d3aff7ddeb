"""A tool process: `python -m asyncrl.environments.tools.tool_worker NAME...`; the names are for people. A request is
the (name, arguments) of a call; the answer is a `ToolResult`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config.environments import ToolUseConfig
from asyncrl.environments.observation import MAX_TEXT_CHARS
from asyncrl.environments.tools import Tool, build_tools
from asyncrl.environments.tools.tool import ToolResult, no_such_tool
from asyncrl.workers.worker_loop import serve


def _caller(config: ToolUseConfig) -> Callable[[tuple[str, Mapping[str, Any]]], ToolResult]:
    tools = {tool.name: tool for tool in build_tools(config)}
    for tool in tools.values():
        getattr(tool, "start", lambda: None)()
    return lambda request: call(tools, *request)


def call(tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any]) -> ToolResult:
    """Makes one call; any error becomes text for the policy."""
    tool = tools.get(name)
    if tool is None:
        return no_such_tool(name, tools)
    try:
        inspect.signature(tool.call).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(tool.parameters.get("properties", {})) or "no arguments"
        return ToolResult(f"Error: {tool.name} takes {takes}: {error}", True)
    try:
        result: Any = tool.call(**arguments)
    except BaseException as error:  # noqa: BLE001 - boundary: the policy reads the error of its call
        return ToolResult(f"Error: {type(error).__name__}: {error}"[:MAX_TEXT_CHARS], True)
    if isinstance(result, str | int | float | bool | None):
        return ToolResult(str(result)[:MAX_TEXT_CHARS])
    from asyncrl.data.images import shown

    return ToolResult(shown(result, lambda value: str(value)[:MAX_TEXT_CHARS]))


if __name__ == "__main__":
    serve(_caller)
