"""Episodes in text: the policy acts, the environment answers with an observation. The loop that such environments
share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from asyncrl.config.environments import GymnasiumConfig, OpenEnvConfig
from asyncrl.data.rows import PromptRow
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.environment import Session, Task, TrajectoryLimits
from asyncrl.environments.observation import EnvironmentReply, for_policy
from asyncrl.errors import DataError, GenerationError, explain
from asyncrl.rewards import RewardResult
from asyncrl.types import Trajectory


class Episode(Protocol):
    """One run of an environment, for one trajectory. The creator of an episode ends it."""

    async def reset(self) -> EnvironmentReply: ...

    async def act(self, response: str) -> EnvironmentReply:
        """`response`: the policy's, which contains the action."""
        ...


async def play(
    episode: Episode, task: Task, session: Session, config: GymnasiumConfig | OpenEnvConfig, limits: TrajectoryLimits
) -> Trajectory:
    """The trajectory of one episode. Its prompt is the row's, with the first observation appended.

    An episode cut off by a limit (of turns, of the trajectory, of one response) has finish_reason "length" and the
    reward of the actions so far; a response that was cut off is no action. Parts: `episode_ended` is 1 if the
    environment ended it; `refused_actions` counts responses without an action.

    Raises GenerationError: the first observation leaves no room for a response; DataError: the chat template refuses
    the messages; the episode's errors.
    """
    chat, first = session.chat, await episode.reset()
    prompt_ids = chat.prompt(_opening(task.row, for_policy(chat, first.text, config.max_observation_tokens)))
    conversation, rewards, refused, ended, cut = Conversation(prompt_ids), [], 0, first.ended, False
    if limits.room(len(prompt_ids), 0) < 1:
        found = f"its prompt with the first observation has {len(prompt_ids)} tokens, which leaves none for a response"
        do = "lower max_observation_tokens, or raise the engine's max_model_len and trainer.max_tokens_per_microbatch"
        raise GenerationError(explain(f"an episode for {task.row.origin}", found, do))
    # A turn: the policy's response, the environment's observation, and the check that another turn fits.
    while True:
        room = limits.room(len(prompt_ids), conversation.num_response_tokens)
        made = await session.generate(conversation.token_ids, room)
        conversation.add_response(made)
        if made.finish_reason == "length" or ended:
            break
        seen = await episode.act(session.decode(made.token_ids))
        rewards.append(seen.reward)
        refused += not seen.accepted
        ended = seen.ended
        if ended:
            break
        text = for_policy(chat, seen.text, config.max_observation_tokens)
        ids = chat.next_turn(made.token_ids, [{"role": "user", "content": text}])
        room = limits.room(len(prompt_ids), conversation.num_response_tokens)
        cut = conversation.num_turns == config.max_turns or room <= len(ids)
        if cut:
            break
        conversation.add_environment(ids)
    reward = sum(rewards) if config.reward == "sum" else (rewards or [0.0])[-1]
    parts = ("episode_ended", float(ended)), ("refused_actions", float(refused))
    return conversation.trajectory(RewardResult(reward), parts=parts, cut=cut)


def setting_of(task: Task, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """The JSON value under `key` in the row's extra_info. Raises DataError: it has another type."""
    text = dict(task.row.extra).get(key)
    if text is None:
        return default
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if not isinstance(value, kind) or isinstance(value, bool):
        do = f"write {key} as {'an object' if kind is Mapping or kind is dict else 'a whole number'}, or leave it out"
        raise DataError(explain(f"{key} of the row at {task.row.origin}", f"{text[:60]!r}", do))
    return value


def _opening(row: PromptRow, observation: str) -> list[dict[str, Any]]:
    """The row's messages and the first observation. The observation joins a last message of the user, since templates
    may require alternating roles."""
    messages: list[dict[str, Any]] = row.conversation()
    if messages[-1]["role"] == "user":
        messages[-1]["content"] = f"{messages[-1]['content']}\n\n{observation}"
        return messages
    return [*messages, {"role": "user", "content": observation}]
