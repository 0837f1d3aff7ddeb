"""Environments of the package verifiers: their agents talk to our endpoint, and their rewards judge.

Source: verifiers 0.4 (`verifiers.v1`). An environment is a taskset, agents, and a way to turn one task into one
episode.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from asyncrl.config.environments import VerifiersConfig
from asyncrl.config.recipe import Recipe
from asyncrl.data.chat import Chat
from asyncrl.environments.agent import AgentEndpoint
from asyncrl.environments.agent_server import KEY_HEADER, MODEL
from asyncrl.environments.agent_session import TurnLimit
from asyncrl.environments.custom import make_custom, require_package_of
from asyncrl.environments.environment import Session, Task
from asyncrl.environments.episode import setting_of
from asyncrl.errors import ConfigError, DataError, GenerationError, ProcessDied, explain
from asyncrl.remote.tasks import end
from asyncrl.rewards import RewardResult
from asyncrl.types import Trajectory

if TYPE_CHECKING:
    import verifiers.v1 as vf

_CLOSE_S = 4.0
_NO_KEY = "ASYNCRL_KEYS_ARE_IN_A_HEADER"
"""An unset variable, so that verifiers sends none of the machine's keys to our endpoint."""


def load_checked(config: VerifiersConfig) -> vf.Env[Any]:
    """The environment that `rollout.verifiers.env` describes. Raises ConfigError: package missing, or no such
    environment."""
    require_package_of("verifiers")
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    asked = f"rollout.verifiers.env={config.env}"
    do = "write what `[env]` has in a config of verifiers, such as {taskset: {id: NAME}}; install its package"
    return make_custom(asked, lambda: load_environment(resolve_env_config(dict(config.env))), do)


class VerifiersEnvironment:
    """Runs one episode of verifiers per trajectory. Owns the environment, its servers, and the endpoint.

    The task has the index `task` of the row's extra_info in the taskset, else the ordinal of the group, modulo the
    number of tasks. The reward is the sum of the rewards of all traces of the episode. Parts: the rewards by name and
    the metrics as `metric.NAME`, summed over traces; `agent_requests` and `agent_branches`. An episode that fails after
    a request was refused because of a limit has reward 0 and finish_reason "length".
    """

    def __init__(self, recipe: Recipe, chat: Chat) -> None:
        self._config = recipe.rollout.verifiers
        limit = TurnLimit(self._config.max_turns, "rollout.verifiers.max_turns")
        self._endpoint = AgentEndpoint(recipe, chat, limit)
        self._environment: vf.Env[Any] | None = None
        self._tasks: list[vf.Task] = []
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads the tasks and starts the shared resources of episodes. Raises ConfigError, DeadlineExceeded,
        ProcessDied."""
        await self._endpoint.start()
        self._environment = load_checked(self._config)
        self._tasks = await asyncio.to_thread(self._loaded, self._environment)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(self._environment, ready), name="environment of verifiers")
        await asyncio.wait([ready, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            try:
                await self._serving
            except Exception as error:
                do = "see the log; run it with verifiers' own `vf-eval`"
                raise ProcessDied(explain("start the environment of verifiers", repr(error), do)) from error

    async def close(self) -> None:
        self._stop.set()
        await end(self._serving, patience_s=_CLOSE_S)
        await self._endpoint.close()

    async def run(self, task: Task, session: Session) -> Trajectory:
        """Raises GenerationError: the episode failed; as `AgentEndpoint.run`."""
        number = setting_of(task, "task", int, task.ordinal % len(self._tasks))
        if not 0 <= number < len(self._tasks):
            found = f"the taskset has {len(self._tasks)} tasks"
            raise DataError(explain(f"task {number} of the row at {task.row.origin}", found, "count from 0"))
        theirs, name = self._tasks[number], f"of verifiers, {self._config.env}"
        recorded, episode = await self._endpoint.run(name, session, lambda url, key: self._play(theirs, url, key))
        return recorded.trajectory(RewardResult(0.0) if episode is None else _judged(episode))

    async def _play(self, task: vf.Task, url: str, key: str) -> vf.Episode[Any, Any, Any]:
        """Raises GenerationError: the episode failed."""
        import verifiers.v1 as vf

        assert self._environment is not None
        client = vf.EvalClientConfig(base_url=url, api_key_var=_NO_KEY, headers={KEY_HEADER: key})
        episode = await self._environment.run_episode(task, vf.ModelContext(model=MODEL, client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            found = f"{errors[-1].type}: {errors[-1].message}" if errors else "it ended without saying why"
            asked = f"an episode of verifiers, task {task.data.idx}"
            raise GenerationError(explain(asked, found, "see the log; run the task with verifiers' own `vf-eval`"))
        return episode

    async def _serve(self, environment: vf.Env[Any], ready: asyncio.Future[None]) -> None:
        """Holds the shared resources, which must be entered and left in one task."""
        async with environment.serving():
            ready.set_result(None)
            await self._stop.wait()

    def _loaded(self, environment: vf.Env[Any]) -> list[vf.Task]:
        """Raises ConfigError: there are no tasks."""
        tasks = list(itertools.islice(environment.taskset, self._config.max_tasks))
        if not tasks:
            found = "its taskset has no tasks"
            raise ConfigError(explain(f"rollout.verifiers.env={self._config.env}", found, "choose another one"))
        return tasks


def _judged(episode: vf.Episode[Any, Any, Any]) -> RewardResult:
    """The rewards of all traces; an unscored trace counts as 0."""
    parts: dict[str, float] = {}
    total = 0.0
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                total += reward.value
                parts[name] = parts.get(name, 0.0) + reward.score
        for name, value in trace.metrics.items():
            if value is not None:
                parts[f"metric.{name}"] = parts.get(f"metric.{name}", 0.0) + float(value)
    return RewardResult(total, tuple(parts.items()))
