"""Tool use within one response: generation stops where a call is closed, the result is inserted as untrained text, and
the same response continues."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.config.environments import InterleavedConfig
from asyncrl.config.recipe import Recipe
from asyncrl.data.chat import Chat
from asyncrl.data.tokenizer import stop_token_ids
from asyncrl.data.tool_calls import ToolPrompt, described_between, parse_between
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.environment import Session, Task, TrajectoryLimits, limits_of
from asyncrl.environments.observation import for_policy, without
from asyncrl.environments.toolbox import Toolbox, tool_schemas
from asyncrl.errors import ConfigError, explain
from asyncrl.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def interleaved_prompt(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> ToolPrompt | None:
    """Instructions for the tools in words; None if the rows contain them. Blocks, and raises, as `tool_schemas`.

    Raises ConfigError: the closing text is the token that ends every response.
    """
    config = recipe.rollout.interleaved_tool_use
    ends = stop_token_ids(tokenizer, recipe.model, recipe.rollout.sampling.stop)
    if config.close in (tokenizer.decode([token]) for token in ends):
        found = "it ends every response of this model: a call could not be told from an end"
        do = "choose another text, such as </tool>"
        raise ConfigError(explain(f"rollout.interleaved_tool_use.close={config.close!r}", found, do))
    if not config.describe_tools:
        return None
    schemas = tool_schemas(recipe.rollout.tool_use)
    shown = f"{config.result_open}...{config.result_close}"
    return ToolPrompt(schemas, described_between(schemas, config.open, config.close, shown), in_words=True)


@dataclass(slots=True)
class _Written:
    """The response so far: its calls, and the policy's text since the last result."""

    conversation: Conversation
    calls: int = 0
    errors: int = 0
    last: list[np.ndarray] = field(default_factory=list)


class InterleavedToolUse:
    """`rollout.sampling.max_response_tokens` limits the whole response, including results.

    A response cut off by a limit has finish_reason "length": no room is left for a result or for text after it, or the
    limit of calls is reached (its last call was not made). Its parts `tool_calls` and `tool_errors` count calls.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._config: InterleavedConfig = recipe.rollout.interleaved_tool_use
        self._max_result_tokens = recipe.rollout.tool_use.max_result_tokens
        self._limits: TrajectoryLimits = limits_of(recipe)
        self._tools = Toolbox(recipe)
        self.start, self.close = self._tools.start, self._tools.close

    async def run(self, task: Task, session: Session) -> Trajectory:
        written = _Written(Conversation(task.prompt_ids))
        conversation = written.conversation
        while True:
            made = await session.generate(conversation.token_ids, self._room(task, conversation))
            conversation.add_response(made)
            written.last.append(made.token_ids)
            closed = made.finish_reason == "stop" and self._is_closed(session.chat, made.token_ids)
            cut = closed and not await self._answer(task, session.chat, written)
            if cut or not closed:
                break
        ids = written.last
        if self._config.judged == "response":
            ids = [conversation.token_ids[len(task.prompt_ids) :]]
        result = await session.reward(np.concatenate(ids), task.row)
        parts = ("tool_calls", float(written.calls)), ("tool_errors", float(written.errors))
        return conversation.trajectory(result, parts=parts, cut=cut)

    async def _answer(self, task: Task, chat: Chat, written: _Written) -> bool:
        """Inserts the result of the call that was just closed; nothing if no call was opened. False: the response has
        reached a limit."""
        # The call: the text between the last closing text and the opening text before it.
        before, _, _ = chat.decode_turn(np.concatenate(written.last)).rpartition(self._config.close)
        _, opened, between = before.rpartition(self._config.open)
        if not opened:
            return self._room(task, written.conversation) > 0
        if written.calls == self._config.max_calls:
            return False
        found = parse_between(between, self._tools.signatures, self._config.open, self._config.close)
        result = await self._tools.call(found)
        written.calls += 1
        written.errors += result.failed
        text = without(for_policy(chat, result.text, self._max_result_tokens), self._config.result_close)
        framed = f"{self._config.result_open}{text}{self._config.result_close}"
        ids = chat.encode_after(self._config.close, framed)
        if self._room(task, written.conversation) <= len(ids):
            return False
        written.conversation.add_environment(ids)
        written.last.clear()
        return True

    def _is_closed(self, chat: Chat, token_ids: np.ndarray) -> bool:
        """Whether the last token completes the closing text. Not always: a closing text that is a special token may be
        spelled out, which does not end the response."""
        close = self._config.close
        return close in chat.decode_turn(token_ids) and close not in chat.decode_turn(token_ids[:-1])

    def _room(self, task: Task, conversation: Conversation) -> int:
        return self._limits.room(len(task.prompt_ids), conversation.num_response_tokens)
