"""The protocol of an environment: turns a prompt into a trajectory by calling the policy."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from asyncrl.data.chat import Chat
from asyncrl.data.rows import PromptRow
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
    """The calls that an environment may make for one trajectory. Interruptions by weight updates are invisible here."""

    @property
    def chat(self) -> Chat:
        """Prompts and turns in the model's format, as token ids."""
        ...

    async def generate(self, prompt_ids: np.ndarray, max_tokens: int | None = None) -> Generation:
        """The policy's next response to these tokens; `max_tokens` lowers the recipe's limit. Raises GenerationError.

        In a conversation `prompt_ids` are the prompt and all turns so far, with the ids that were sampled.
        """
        ...

    def decode(self, token_ids: np.ndarray) -> str:
        """Text without special tokens."""
        ...

    async def reward(self, response: str | np.ndarray, row: PromptRow) -> RewardResult:
        """The recipe's reward, computed in a process of its own. Token ids are decoded there too, as `decode` does.

        Raises what the reward raises; DeadlineExceeded: it took too long; ProcessDied: it killed its process.
        """
        ...


class Environment(Protocol):
    """One object runs all trajectories of a rollouter, many at once. It may also be `Managed`."""

    def run(self, task: Task, session: Session) -> Coroutine[Any, Any, Trajectory]:
        """(async) One trajectory. An exception fails the attempt at the group, never the run.

        After a restart it is called again with a session that replays the recorded responses. Its requests should
        therefore depend only on the task and on the responses. At the first request that differs, the rest of the
        record is dropped and generated again.
        """
        ...


@runtime_checkable
class Managed(Protocol):
    """An environment that holds something, such as processes or a server: it is started before its first trajectory
    and closed after the last one."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...
