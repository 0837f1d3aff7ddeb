"""Tool use in turns: the environment runs the calls of each turn and appends the results, until a turn has no call."""

from __future__ import annotations

from asyncrl.config.environments import ToolUseConfig
from asyncrl.config.recipe import Recipe
from asyncrl.data.chat import Chat, Message
from asyncrl.data.rows import without_marks
from asyncrl.data.tool_calls import PARSERS, Call, ToolPrompt, parser_for, tools_for
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.environment import Session, Task, TrajectoryLimits, limits_of
from asyncrl.environments.observation import for_policy, speakable
from asyncrl.environments.toolbox import Toolbox, tool_schemas
from asyncrl.environments.tools.tool import ToolResult
from asyncrl.remote.tasks import concurrently
from asyncrl.types import Trajectory


def tool_prompt(config: ToolUseConfig, template: str) -> ToolPrompt:
    """The description of the tools for the policy's prompt. Blocks, and raises, as `tool_schemas`."""
    return tools_for(tool_schemas(config), parser_for(config.parser, template), template)


class ToolUse:
    """The reward judges the text of the last turn.

    A trajectory cut off by a limit has finish_reason "length": the limit of a turn, of the trajectory, or of the number
    of turns (the call of its last turn was not made). Its parts `tool_calls` and `tool_errors` count calls.
    """

    def __init__(self, recipe: Recipe, chat: Chat) -> None:
        self._config = config = recipe.rollout.tool_use
        self._limits: TrajectoryLimits = limits_of(recipe)
        self._parse = PARSERS[parser_for(config.parser, chat.template)]
        self._tools = Toolbox(recipe)
        self.start, self.close = self._tools.start, self._tools.close

    async def run(self, task: Task, session: Session) -> Trajectory:
        conversation = Conversation(task.prompt_ids)
        made, num_calls, num_errors, cut = None, 0, 0, False
        while True:
            room = self._limits.room(len(task.prompt_ids), conversation.num_response_tokens)
            made = await session.generate(conversation.token_ids, room)
            conversation.add_response(made)
            calls = self._parse(session.chat.decode_turn(made.token_ids), self._tools.signatures)
            if not calls or made.finish_reason == "length":
                break
            # The results need room for a further response, else the trajectory ends at its last turn.
            cut = conversation.num_turns == self._config.max_turns
            if cut:
                break
            results = await concurrently(self._tools.call(call) for call in calls)
            num_calls += len(results)
            num_errors += sum(result.failed for result in results)
            messages = [self._message(session.chat, c, r) for c, r in zip(calls, results, strict=True)]
            ids = session.chat.next_turn(made.token_ids, messages, with_tools=True)
            cut = self._limits.room(len(task.prompt_ids), conversation.num_response_tokens) <= len(ids)
            if cut:
                break
            conversation.add_environment(ids)
        result = await session.reward(made.token_ids, task.row)
        parts = ("tool_calls", float(num_calls)), ("tool_errors", float(num_errors))
        return conversation.trajectory(result, parts=parts, cut=cut)

    def _message(self, chat: Chat, call: Call, result: ToolResult) -> Message:
        text = for_policy(chat, result.text, self._config.max_result_tokens)
        return {"role": "tool", "name": chat.harmless(without_marks(speakable(call.name))), "content": text}
