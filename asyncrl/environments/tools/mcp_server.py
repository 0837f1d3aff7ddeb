"""MCP servers whose tools the policy may call: one connection per server, restarted when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.config.environments import McpServerConfig
from asyncrl.data.images import Shown, shown
from asyncrl.environments.observation import MAX_TEXT_CHARS
from asyncrl.environments.tools.tool import ToolResult
from asyncrl.errors import AsyncRLError, ConfigError, Process, ProcessDied, explain
from asyncrl.remote.tasks import end

if TYPE_CHECKING:
    import mcp

logger = logging.getLogger(__name__)

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 30.0
_CLOSE_S = 4.0
"""Longest time for a connection to end; doubled for a command, to which the SDK sends SIGTERM, then SIGKILL."""
_MAX_PAGES = 100
_LOST_MESSAGES = ("Session terminated", "Server returned an error response", "Unexpected content type")
"""The SDK's messages for HTTP answers that are not JSON-RPC."""
_SHARED_VARIABLE = "ASYNCRL_RUN"
"""The janitor finds a server that outlives its rollouter by this variable."""


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of a server. `name`: for the policy; `own_name`: of the server. `parameters`: JSON schema."""

    name: str
    own_name: str
    description: str
    parameters: Mapping[str, Any]


class McpServer:
    """Owns the connection to one server, and the server's process if it was started here. Belongs to one event loop.

    Consumes: concurrent `call`s of all trajectories of the rollouter.
    Produces: one result or one error for each call.
    Waits for: an answer, at most `timeout_s`; a connection, at most `start_timeout_s` of its settings.
    Unblocked by: the answer; the end of the connection, which fails the calls in flight.
    Stops when: `close` is called.

    The connection ends, and is made again with growing delays, if a call finds it broken, or if the server answers
    neither a call nor a request for its tools in time. `restarts` counts this.
    """

    def __init__(self, name: str, config: McpServerConfig, *, timeout_s: float) -> None:
        """Must be called in its event loop.

        Args:
            name: in the recipe, for messages.
            timeout_s: longest time for one call.
        """
        self.name = name
        self.tools: tuple[McpTool, ...] = ()
        self.restarts = 0
        self._config = config
        self._timeout_s = timeout_s
        self._client: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
        """The connection; a new future during a reconnect."""
        self._ended = asyncio.Event()
        self._why = "it has not been started"
        self._owner: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Connects and lists the tools. Raises ConfigError: the server cannot be started, does not answer, or has no
        tools."""
        self._owner = asyncio.create_task(self._own(), name=f"MCP server {self.name}")
        await asyncio.wait([self._client, self._owner], return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            await self._owner
        await asyncio.shield(self._client)

    async def call(self, tool: McpTool, arguments: Mapping[str, Any]) -> ToolResult:
        """The text for the policy. Raises ProcessDied: the connection has ended, or cannot be restored."""
        client = await self._connected(tool)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await client.call_tool(tool.own_name, dict(arguments))
        except TimeoutError:
            await self._probe(client, tool)
            return ToolResult(f"Error: {tool.name} took more than {self._timeout_s:g} s", failed=True)
        except Exception as error:
            if _is_lost(error) or not self._is_current(client):
                raise self._lost(client, f"call {tool.own_name}", _reason(error)) from error
            return ToolResult(f"Error: {_reason(error)}", failed=True)
        return _result_of(answer)

    async def close(self) -> None:
        """Ends the connection and the server's process. Idempotent."""
        self._closed = True
        self._ended.set()
        await end(self._owner, patience_s=_CLOSE_S)

    # -- inside --------------------------------------------------------------------------------------------------

    async def _own(self) -> None:
        """Maintains the connection. It is entered and left in this task, as its cancel scopes require."""
        failures = 0
        while not self._closed:
            self._ended.clear()
            try:
                async with connected(self.name, self._config) as (client, tools):
                    if self.tools and tools != self.tools:
                        found = f"it has other tools than before: {', '.join(t.own_name for t in tools)}"
                        raise ConfigError(explain(_asked(self.name, self._config), found, "let it have the same tools"))
                    self.tools, failures = tools, 0
                    self._client.set_result(client)
                    await self._ended.wait()
            except Exception as error:
                if not self.tools:
                    raise  # the first connection: `start` fails
                failures += not self._client.done()
                self._why = _reason(error)
                logger.warning("MCP server %s: %s", self.name, self._why)
            # Later calls wait on a new future until the next connection.
            if self._client.done():
                self._client = asyncio.get_running_loop().create_future()
            if not self._closed:
                self.restarts += 1
                await asyncio.sleep(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**failures))

    async def _connected(self, tool: McpTool) -> mcp.Client:
        """The connection; waits during a reconnect."""
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                return await asyncio.shield(self._client)
        except TimeoutError:
            raise self._died(f"call {tool.own_name}", f"it cannot be started again: {self._why}") from None

    async def _probe(self, client: mcp.Client, tool: McpTool) -> None:
        """Checks the server after an unanswered call. Raises ProcessDied: it does not list its tools in time either."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.list_tools(cache_mode="bypass")
        except Exception as error:
            found = f"neither {tool.own_name} nor the list of its tools was answered within {self._timeout_s:g} s"
            raise self._lost(client, f"call {tool.own_name}", found) from error

    def _is_current(self, client: mcp.Client) -> bool:
        return self._client.done() and self._client.result() is client

    def _lost(self, client: mcp.Client, asked: str, found: str) -> ProcessDied:
        """Starts a reconnect, unless another call did."""
        self._why = found
        if self._is_current(client):
            self._client = asyncio.get_running_loop().create_future()
            self._ended.set()
        return self._died(asked, found)

    def _died(self, asked: str, found: str) -> ProcessDied:
        message = explain(f"{asked} of MCP server {self.name}", found, "see the log: the server writes to it, too")
        return ProcessDied(message).of(Process(f"MCP server {self.name}"))


@asynccontextmanager
async def connected(name: str, config: McpServerConfig) -> AsyncIterator[tuple[mcp.Client, tuple[McpTool, ...]]]:
    """A connection and the tools to offer, by name. Ends the server's process if it was started here.

    Raises:
        ConfigError: the server cannot be started or reached, is too slow, or lacks tools that are asked for.
        TimeoutError: the session was usable, and did not end in time.
    """
    import httpx2
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    asked = _asked(name, config)
    opened, leave_s = False, _CLOSE_S if config.url else 2 * _CLOSE_S
    async with httpx2.AsyncClient(headers=config.headers, timeout=httpx2.Timeout(30, read=None)) as http:
        if config.url:
            transport: Any = streamable_http_client(config.url, http_client=http)
        else:
            variables = config.env
            if (run := os.environ.get(_SHARED_VARIABLE)) is not None:
                variables = {_SHARED_VARIABLE: run, **variables}
            process = StdioServerParameters(command=config.command[0], args=config.command[1:], env=variables)
            transport = stdio_client(process, errlog=sys.__stderr__ or sys.stderr)
        # the SDK ends an HTTP session with a request without a deadline, so the exit needs one
        limit = asyncio.timeout(config.start_timeout_s + leave_s)
        try:
            async with limit, AsyncExitStack() as stack:
                async with asyncio.timeout(config.start_timeout_s):
                    client = await stack.enter_async_context(Client(transport))
                    tools = _offered(asked, config, await _listed(client))
                limit.reschedule(None)
                opened = True
                try:
                    yield client, tools
                finally:
                    limit.reschedule(asyncio.get_running_loop().time() + leave_s)
        except Exception as error:
            if opened and limit.expired():
                raise TimeoutError(f"it did not end the session within {leave_s:g} s") from error
            if opened:
                raise
            first = _first(error)
            if isinstance(first, AsyncRLError):
                raise first from None
            found = "no answer in time" if isinstance(first, TimeoutError) else _reason(first)
            do = "start it by hand to see what it says, or raise start_timeout_s"
            raise ConfigError(explain(asked, found, do)) from error


def list_mcp_tools(servers: Mapping[str, McpServerConfig]) -> tuple[McpTool, ...]:
    """The tools of all servers, in the order of the servers, then by name. Blocks: connects to each server and leaves
    it, within its start_timeout_s and some seconds. Works inside a running event loop. Raises ConfigError as
    `connected`."""

    async def tools_of(name: str, config: McpServerConfig) -> tuple[McpTool, ...]:
        tools: tuple[McpTool, ...] = ()
        with suppress(TimeoutError):  # at exit
            async with connected(name, config) as (_, tools):
                pass
        return tools

    async def all_tools() -> tuple[McpTool, ...]:
        found = await asyncio.gather(*(tools_of(name, config) for name, config in servers.items()))
        return tuple(tool for tools in found for tool in tools)

    if not servers:
        return ()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(all_tools())).result()


async def _listed(client: mcp.Client) -> list[McpTool]:
    tools: list[McpTool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            name = re.sub(r"\W", "_", tool.name)
            tools.append(McpTool(name, tool.name, tool.description or "", dict(tool.input_schema)))
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _offered(asked: str, config: McpServerConfig, tools: list[McpTool]) -> tuple[McpTool, ...]:
    known = sorted(tool.own_name for tool in tools)
    missing = sorted(set(config.tools) - set(known))
    if missing or not tools:
        found = f"it has no tool {', '.join(missing)}; its tools are {', '.join(known) or 'none'}"
        raise ConfigError(explain(asked, found, "name tools that it has, or none for all of them"))
    chosen = [tool for tool in tools if not config.tools or tool.own_name in config.tools]
    return tuple(sorted(chosen, key=lambda tool: tool.name))


def _asked(name: str, config: McpServerConfig) -> str:
    return f"rollout.tool_use.mcp.{name}.{f'url={config.url}' if config.url else f'command={config.command}'}"


def _result_of(answer: Any) -> ToolResult:
    """The texts and images of a result, one per line; for other content its kind. Text is truncated to
    MAX_TEXT_CHARS."""
    parts: list[str | bytes] = []
    for part in answer.content:
        own: Shown = part.text if part.type == "text" else f"[{part.type}]"
        if part.type == "image":
            own = shown(part.model_dump(), lambda _: "[image]")
        parts += [*["\n"] * bool(parts), *([own] if isinstance(own, str) else own)]
    has_images = any(isinstance(part, bytes) for part in parts)
    text: Shown = tuple(parts) if has_images else "".join(map(str, parts))[:MAX_TEXT_CHARS] or "(no content)"
    if answer.is_error:
        text = f"Error: {text}" if isinstance(text, str) else ("Error: ", *text)
    return ToolResult(text, failed=bool(answer.is_error))


def _is_lost(error: BaseException) -> bool:
    """True if the connection is unusable: closed, its session unknown to the server, or the answer not MCP's (an error
    page of a proxy, a login page)."""
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return error.code == CONNECTION_CLOSED or error.message.startswith(_LOST_MESSAGES)
    return type(error).__name__ in ("ClosedResourceError", "BrokenResourceError")


def _first(error: BaseException) -> BaseException:
    """The first error of a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(error: BaseException) -> str:
    first = _first(error)
    text = str(first).strip() or "no message"
    return text if isinstance(first, AsyncRLError) else f"{type(first).__name__}: {text}"
