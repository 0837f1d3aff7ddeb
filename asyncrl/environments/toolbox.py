"""The tools of a recipe, in tool processes and in MCP servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.environments import ToolUseConfig
from asyncrl.config.recipe import Recipe
from asyncrl.data.call_values import Call, MalformedCall, ToolSignature, signature_of
from asyncrl.environments.custom import require_package_of
from asyncrl.environments.tools import build_tools, schema_of
from asyncrl.environments.tools.mcp_server import McpServer, McpTool, list_mcp_tools
from asyncrl.environments.tools.tool import ToolDescription, ToolResult, no_such_tool
from asyncrl.errors import ConfigError, DeadlineExceeded, ProcessDied, explain
from asyncrl.workers.messages import WorkerSpec
from asyncrl.workers.worker_pool import WorkerPool


def check_tools(config: ToolUseConfig) -> None:
    """Raises ConfigError: a tool cannot be made, or the package for MCP servers is missing. Starts nothing."""
    build_tools(config)
    if config.mcp:
        require_package_of("mcp")


def tool_schemas(config: ToolUseConfig) -> tuple[Mapping[str, Any], ...]:
    """OpenAI's function schema of each tool. Blocks on requests to MCP servers.

    Raises ConfigError: a tool cannot be made, a server cannot be started or reached, or two tools share a name.
    """
    check_tools(config)
    return tuple(map(schema_of, _all_named_once([*build_tools(config), *list_mcp_tools(config.mcp)])))


class Toolbox:
    """Owns the tool processes and the MCP servers of `rollout.tool_use`. Errors of calls are results for the policy."""

    def __init__(self, recipe: Recipe) -> None:
        self._config = config = recipe.rollout.tool_use
        self._own_tools = build_tools(config)
        self._pool = ToolPool(config, start_timeout_s=recipe.ray.start_timeout_s)
        self._servers: tuple[McpServer, ...] = ()
        self._served: dict[str, tuple[McpServer, McpTool]] = {}
        """Name of a tool -> its MCP server."""
        self.signatures = _signatures(self._own_tools)
        """Signatures of all tools; `start` adds the MCP tools."""

    async def start(self) -> None:
        """Starts the tool processes and the MCP servers, or connects to them.

        Raises ConfigError, ProcessDied, DeadlineExceeded.
        """
        timeout_s = self._config.tool_timeout_s
        try:
            if self._own_tools:
                await self._pool.start()
            self._servers = tuple(McpServer(n, c, timeout_s=timeout_s) for n, c in self._config.mcp.items())
            await asyncio.gather(*(server.start() for server in self._servers))
        except BaseException:
            await self.close()
            raise
        self._served = {tool.name: (server, tool) for server in self._servers for tool in server.tools}
        tools = [tool for server in self._servers for tool in server.tools]
        self.signatures = _signatures(_all_named_once([*self._own_tools, *tools]))

    async def close(self) -> None:
        """Ends the tool processes and MCP servers. Idempotent."""
        await asyncio.gather(self._pool.close(), *(server.close() for server in self._servers))

    async def call(self, call: Call) -> ToolResult:
        """Raises ProcessDied: no process is available, or the toolbox was closed; the error of a lost MCP server."""
        if isinstance(call, MalformedCall):
            return ToolResult(f"Error: {call.error}", failed=True)
        if (served := self._served.get(call.name)) is not None:
            server, tool = served
            return await server.call(tool, call.arguments)
        known = [tool.name for tool in self.signatures]
        if call.name not in known:
            return no_such_tool(call.name, known)
        return await self._pool.run(call.name, call.arguments)


def _all_named_once(tools: Sequence[ToolDescription]) -> Sequence[ToolDescription]:
    """Raises ConfigError: two tools share a name."""
    for name, number in Counter(tool.name for tool in tools).items():
        if number > 1:
            do = "choose among the tools of a server: rollout.tool_use.mcp.NAME.tools"
            raise ConfigError(explain("the tools of rollout.tool_use", f"{number} are called {name}", do))
    return tools


def _signatures(tools: Sequence[ToolDescription]) -> tuple[ToolSignature, ...]:
    return tuple(signature_of(tool.name, tool.parameters) for tool in tools)


# Tools in worker processes.


class ToolPool(WorkerPool):
    """A `WorkerPool` whose calls are tools. Errors of a call become text for the policy."""

    def __init__(self, config: ToolUseConfig, *, start_timeout_s: float = 60.0) -> None:
        super().__init__(
            WorkerSpec(
                name="tool process",
                module="asyncrl.environments.tools.tool_worker",
                labels=tuple(config.tools),
                settings=config,
                asked=f"rollout.tool_use.tools={config.tools}",
                answer=ToolResult,
                advice="make the tool end, or raise rollout.tool_use.tool_timeout_s",
                num_workers=config.tool_workers,
                timeout_s=config.tool_timeout_s,
                start_timeout_s=start_timeout_s,
            )
        )

    async def run(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises ProcessDied: no process is available, or the pool was closed."""
        try:
            return await self.call((name, arguments), f"a call of tool {name}")
        except DeadlineExceeded:
            return ToolResult(f"Error: {name} took more than {self._spec.timeout_s:g} s", failed=True)
        except ProcessDied:
            if self.refuses:
                raise
            return ToolResult(f"Error: {name} ended without a result", failed=True)
