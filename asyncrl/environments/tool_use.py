"""The policy calls tools: the environment runs the calls of each turn and appends the results, until a turn has
none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncrl.config.environments import ToolUseConfig
from asyncrl.config.recipe import Recipe
from asyncrl.data.chat import Chat, Message
from asyncrl.data.tool_calls import PARSERS, Call, MalformedCall, ToolSignature, described, parser_for
from asyncrl.data.tool_prompt import ToolPrompt
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.environment import Session, Task
from asyncrl.environments.limits import TrajectoryLimits, limits_of
from asyncrl.environments.tools import Tool, build_tools, schema_of
from asyncrl.environments.tools.tool import ToolResult
from asyncrl.environments.tools.tool_pool import ToolPool
from asyncrl.types import Trajectory


def tool_prompt(config: ToolUseConfig, template: str) -> ToolPrompt:
    """The description of the tools for the policy's prompt. Raises ConfigError: a tool cannot be made."""
    schemas = tuple(schema_of(tool) for tool in build_tools(config))
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
        self._limits: TrajectoryLimits = limits_of(recipe, config.max_turns, config.max_trajectory_tokens)
        self._parse = PARSERS[parser_for(config.parser, chat.template)]
        self._tools = tuple(map(_signature, build_tools(config)))
        self._pool = ToolPool(config, start_timeout_s=recipe.ray.start_timeout_s)

    async def start(self) -> None:
        """Starts the tool processes. Raises ConfigError, ProcessDied, DeadlineExceeded."""
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

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
        return await self._pool.call(call.name, call.arguments)

    def _message(self, chat: Chat, call: Call, result: ToolResult) -> Message:
        text, limit = _speakable(result.text), self._config.max_result_tokens
        # a token has at least one byte: a text that is short enough need not be tokenized to know
        if len(text.encode()) > limit:
            ids = chat.encode(text)
            if len(ids) > limit:
                text = f"{chat.decode(ids[:limit])}\n[cut: the first {limit} of {len(ids)} tokens]"
        return {"role": "tool", "name": chat.harmless(_speakable(call.name)), "content": chat.harmless(text)}


def _speakable(text: str) -> str:
    """The text without unpaired surrogates, which JSON and tools may contain and no tokenizer accepts."""
    return text.encode(errors="replace").decode()


def _signature(tool: Tool) -> ToolSignature:
    return ToolSignature(tool.name, next(iter(tool.parameters.get("properties", {})), None))
