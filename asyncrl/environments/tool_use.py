"""The policy calls tools: the environment runs the calls of each turn and appends the results, until a turn has
none."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from asyncrl.config.environments import ToolUseConfig
from asyncrl.config.recipe import Recipe
from asyncrl.data.chat import Chat, Message
from asyncrl.data.tool_calls import PARSERS, Call, MalformedCall, ToolSignature, described, parser_for
from asyncrl.data.tool_prompt import ToolPrompt
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.environment import Session, Task
from asyncrl.environments.limits import TrajectoryLimits, limits_of
from asyncrl.environments.observation import for_policy, speakable
from asyncrl.environments.packages import require_package_of
from asyncrl.environments.tools import build_tools, schema_of
from asyncrl.environments.tools.mcp_server import McpServer, McpTool, list_mcp_tools
from asyncrl.environments.tools.tool import ToolDescription, ToolResult, no_such_tool
from asyncrl.environments.tools.tool_pool import ToolPool
from asyncrl.errors import ConfigError, explain
from asyncrl.types import Trajectory


def check_tools(config: ToolUseConfig) -> None:
    """Raises ConfigError: a tool cannot be made, or the package for MCP servers is missing. Starts nothing."""
    build_tools(config)
    if config.mcp:
        require_package_of("mcp")


def tool_prompt(config: ToolUseConfig, template: str) -> ToolPrompt:
    """The description of the tools for the policy's prompt. Blocks while it asks MCP servers for theirs.

    Raises ConfigError: a tool cannot be made, a server cannot be started or reached, or two tools have one name.
    """
    check_tools(config)
    tools = _all_named_once([*build_tools(config), *list_mcp_tools(config.mcp)])
    schemas = tuple(schema_of(tool) for tool in tools)
    return ToolPrompt(schemas, described(schemas, parser_for(config.parser, template)))


class ToolUse:
    """The reward judges the text of the last turn.

    A trajectory that a limit cuts off has finish_reason "length": the limit of a turn, of the trajectory, or of the
    number of turns (its last turn then has a call that was not made). Its parts `tool_calls` and `tool_errors` count
    calls.
    """

    def __init__(self, recipe: Recipe, chat: Chat) -> None:
        config = recipe.rollout.tool_use
        self._config = config
        self._limits: TrajectoryLimits = limits_of(recipe)
        self._parse = PARSERS[parser_for(config.parser, chat.template)]
        self._own_tools = build_tools(config)
        self._tools = tuple(map(_signature, self._own_tools))
        self._pool = ToolPool(config, start_timeout_s=recipe.ray.start_timeout_s)
        self._servers: tuple[McpServer, ...] = ()
        self._served: dict[str, tuple[McpServer, McpTool]] = {}
        """Name of a tool -> its MCP server."""

    async def start(self) -> None:
        """Starts the tool processes, and the MCP servers or the connections to them.

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
        self._tools = tuple(map(_signature, _all_named_once([*self._own_tools, *tools])))

    async def close(self) -> None:
        """Ends the tool processes and MCP servers. Idempotent."""
        await asyncio.gather(self._pool.close(), *(server.close() for server in self._servers))

    async def run(self, task: Task, session: Session) -> Trajectory:
        conversation = Conversation(task.prompt_ids)
        made, num_calls, num_errors, cut = None, 0, 0, False
        while True:
            room = self._limits.room(len(task.prompt_ids), conversation.num_response_tokens)
            made = await session.generate(conversation.token_ids, room)
            conversation.add_response(made)
            calls = self._parse(session.chat.decode_turn(made.token_ids), self._tools)
            if not calls or made.finish_reason == "length":
                break
            cut = conversation.num_turns == self._config.max_turns
            if cut:
                break
            results = await self._run(calls)
            num_calls += len(results)
            num_errors += sum(result.failed for result in results)
            messages = [self._message(session.chat, c, r) for c, r in zip(calls, results, strict=True)]
            ids = session.chat.next_turn(made.token_ids, messages)
            cut = self._limits.room(len(task.prompt_ids), conversation.num_response_tokens) <= len(ids)
            if cut:
                break
            conversation.add_environment(ids)
        result = await session.reward(session.decode(made.token_ids), task.row)
        parts = ("tool_calls", float(num_calls)), ("tool_errors", float(num_errors))
        return conversation.trajectory(result, parts=parts, cut=cut)

    async def _run(self, calls: Sequence[Call]) -> list[ToolResult]:
        """Runs the calls concurrently, as far as there are processes; results are in their order."""
        tasks = [asyncio.create_task(self._one(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, call: Call) -> ToolResult:
        if isinstance(call, MalformedCall):
            return ToolResult(f"Error: {call.error}", failed=True)
        if (served := self._served.get(call.name)) is not None:
            server, tool = served
            return await server.call(tool, call.arguments)
        known = [tool.name for tool in self._tools]
        if call.name not in known:
            return no_such_tool(call.name, known)
        return await self._pool.call(call.name, call.arguments)

    def _message(self, chat: Chat, call: Call, result: ToolResult) -> Message:
        text = for_policy(chat, result.text, self._config.max_result_tokens)
        return {"role": "tool", "name": chat.harmless(speakable(call.name)), "content": text}


def _all_named_once(tools: Sequence[ToolDescription]) -> Sequence[ToolDescription]:
    """Raises ConfigError: two have one name."""
    for name, number in Counter(tool.name for tool in tools).items():
        if number > 1:
            do = "choose among the tools of a server: rollout.tool_use.mcp.NAME.tools"
            raise ConfigError(explain("the tools of rollout.tool_use", f"{number} are called {name}", do))
    return tools


def _signature(tool: ToolDescription) -> ToolSignature:
    return ToolSignature(tool.name, next(iter(tool.parameters.get("properties", {})), None))
