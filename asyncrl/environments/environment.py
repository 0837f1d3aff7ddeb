"""The protocol of an environment: turns a prompt into a trajectory by calling the policy."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from asyncrl.config.recipe import Recipe
from asyncrl.config.rollout import response_limit
from asyncrl.data.chat import Chat
from asyncrl.data.rows import PromptRow
from asyncrl.environments.conversation import Conversation
from asyncrl.rewards import RewardResult
from asyncrl.types import Generation, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One attempt at one prompt. `prompt_ids` [P] int32 after the chat template."""

    row: PromptRow
    prompt_ids: np.ndarray
    ordinal: int
    index: int


class Session(Protocol):
    """The calls that an environment may make for one trajectory. Weight updates interrupt them invisibly."""

    @property
    def chat(self) -> Chat:
        """Prompts and turns in the model's format."""
        ...

    async def generate(
        self,
        prompt_ids: np.ndarray,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        hear: Callable[[np.ndarray], None] | None = None,
    ) -> Generation:
        """The policy's next response to these tokens; `max_tokens` lowers the recipe's limit, and `stop` adds to the
        texts that end it. Raises GenerationError.

        `hear`: called with the response so far, [T] int32, as further tokens arrive; must be quick and must not raise.

        In a conversation `prompt_ids` are the prompt and all turns so far, with the sampled ids.
        """
        ...

    def decode(self, token_ids: np.ndarray) -> str:
        """What the tokens of a response spell, without the token that ends it (`Chat.decode`)."""
        ...

    async def reward(self, response: str | np.ndarray, row: PromptRow) -> RewardResult:
        """The recipe's reward, computed in a separate process, which also decodes token ids as `decode` does.

        Raises the reward's error; DeadlineExceeded: it took too long; ProcessDied: it killed its process.
        """
        ...


class Environment(Protocol):
    """One object runs all trajectories of a rollouter concurrently. It may also be `Managed`."""

    def run(self, task: Task, session: Session) -> Coroutine[Any, Any, Trajectory]:
        """(async) One trajectory. An exception fails the attempt at the group, never the run.

        After a restart it is called again with a session that replays the recorded responses. Its requests should
        therefore depend only on the task and the responses. A request that differs from the recorded ones is generated
        anew.
        """
        ...


@runtime_checkable
class Managed(Protocol):
    """An environment with resources such as processes or a server: started before its first trajectory, closed after
    the last one."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


# Limits on the length of multi-turn trajectories.


@dataclass(frozen=True, slots=True)
class TrajectoryLimits:
    """`total_tokens`: prompt and response, as replicas and trainer accept them. `response_tokens`: all turns and tool
    results. `turn_tokens`: one turn of the policy."""

    total_tokens: int
    response_tokens: int
    turn_tokens: int

    def room(self, prompt_tokens: int, response_tokens: int) -> int:
        """Tokens that may still come; at most 0: none."""
        return min(self.response_tokens, self.total_tokens - prompt_tokens) - response_tokens


def limits_of(recipe: Recipe) -> TrajectoryLimits:
    total = min(recipe.rollout.max_model_len, recipe.max_tokens_per_microbatch)
    return TrajectoryLimits(total, response_limit(recipe.rollout), recipe.rollout.sampling.max_response_tokens)


# One prompt, one response, one reward.


class SingleTurn:
    async def run(self, task: Task, session: Session) -> Trajectory:
        conversation = Conversation(task.prompt_ids)
        generation = await session.generate(task.prompt_ids)
        conversation.add_response(generation)
        return conversation.trajectory(await session.reward(generation.token_ids, task.row))
