"""The protocol of an environment: turns a prompt into a trajectory by calling the policy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from packaging.specifiers import SpecifierSet

from asyncrl.config.checks import require
from asyncrl.config.recipe import Recipe
from asyncrl.config.rollout import response_limit
from asyncrl.data.chat import Chat
from asyncrl.data.rows import PromptRow
from asyncrl.errors import ConfigError, explain
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

    async def generate(self, prompt_ids: np.ndarray, max_tokens: int | None = None) -> Generation:
        """The policy's next response to these tokens; `max_tokens` lowers the recipe's limit. Raises GenerationError.

        In a conversation `prompt_ids` are the prompt and all turns so far, with the sampled ids.
        """
        ...

    def decode(self, token_ids: np.ndarray) -> str:
        """Text without special tokens."""
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
        therefore depend only on the task and the responses. From the first request that differs, the record is dropped
        and responses are generated again.
        """
        ...


@runtime_checkable
class Managed(Protocol):
    """An environment with resources such as processes or a server: started before its first trajectory, closed after
    the last one."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


# User-written environments and tools.


def make_custom(key: str, name: str, made: Callable[[], Any]) -> Any:
    """The result of calling `package.module:Name`. Raises ConfigError for any error of the call."""
    try:
        return made()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a class may call sys.exit
        found = f"making it raised {type(error).__name__}: {error}"
        do = "name a class that can be called without arguments"
        raise ConfigError(explain(f"{key}={name}", found, do)) from error


def require_environment(name: str, built: Any) -> None:
    """Raises ConfigError: `built` has no method `run(task, session)`."""
    run: Any = getattr(built, "run", None)
    found = "" if callable(run) else "it has no method run"
    if not found:
        try:
            inspect.signature(run).bind(None, None)
        except (TypeError, ValueError) as error:
            found = f"its run cannot be called with a task and a session: {error}"
    if found:
        do = "write async def run(self, task, session) -> Trajectory"
        raise ConfigError(explain(f"rollout.environment={name}", found, do))


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


# Packages behind third-party environments, needed only if a recipe names one.


PACKAGES = {
    "gymnasium": ("rollout.environment=gymnasium", "gymnasium", ">=1.0,<2"),
    "mcp": ("rollout.tool_use.mcp", "mcp", ">=2.0,<3"),
    "openenv": ("rollout.environment=openenv", "openenv", ">=0.4,<1"),
    "verifiers": ("rollout.environment=verifiers", "verifiers", ">=0.4,<0.5"),
}
"""Module (equal to its package) -> the recipe's feature that needs it, the extra of asyncrl that installs it, its
versions."""


def require_package_of(module: str) -> None:
    """Raises ConfigError: the package is not installed, or its version does not fit."""
    asked, extra, versions = PACKAGES[module]
    require(
        importlib.util.find_spec(module) is not None,
        asked=asked,
        found=f"the package {module} is not installed",
        do=f"pip install 'asyncrl[{extra}]'",
    )
    try:
        installed = importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return  # imported from source: the version is unknown
    require(
        SpecifierSet(versions).contains(installed, prereleases=True),
        asked=asked,
        found=f"{module} {installed}, needed {versions}",
        do=f"pip install 'asyncrl[{extra}]'",
    )


# One prompt, one response, one reward.


class SingleTurn:
    async def run(self, task: Task, session: Session) -> Trajectory:
        started_s = time.time()
        generation = await session.generate(task.prompt_ids)
        result = await session.reward(generation.token_ids, task.row)
        return Trajectory(
            prompt_ids=task.prompt_ids,
            response_ids=generation.token_ids,
            logprobs=generation.logprobs,
            loss_mask=np.ones(len(generation.token_ids), np.bool_),
            segments=generation.segments,
            reward=result.reward,
            reward_parts=result.parts,
            finish_reason=generation.finish_reason,
            started_s=started_s,
            finished_s=time.time(),
            extra=generation.extra,
        )
