"""Environments of gymnasium with actions as text, and observations as text or images."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from asyncrl.config.environments import GymnasiumConfig
from asyncrl.config.recipe import Recipe
from asyncrl.environments.custom import require_package_of
from asyncrl.environments.environment import Session, Task, limits_of
from asyncrl.environments.episode import play, setting_of
from asyncrl.environments.gymnasium_worker import GymnasiumRequest, make_checked
from asyncrl.environments.observation import EnvironmentReply
from asyncrl.errors import ConfigError, explain
from asyncrl.types import Trajectory
from asyncrl.workers.messages import WorkerSpec
from asyncrl.workers.worker_pool import WorkerPool


def check_gymnasium(config: GymnasiumConfig) -> None:
    """Makes an environment and closes it.

    Raises ConfigError: the package is missing, no environment is named, or it cannot be used.
    """
    require_package_of("gymnasium")
    if not (config.id or config.factory):
        do = "name an environment: rollout.gymnasium.id=FrozenLake-v1, or a factory `package.module:function`"
        raise ConfigError(explain("rollout.environment=gymnasium", "neither an id nor a factory is set", do))
    make_checked(config).close()


class GymnasiumEnvironment:
    """Owns the processes that hold the environments. An episode stays with one process.

    An episode starts with the seed of the row's extra_info, else with the ordinal of its group, the same for all
    trajectories of a group. Its reset gets the `options` of extra_info, if any.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._config = config = recipe.rollout.gymnasium
        self._limits = limits_of(recipe)
        images = recipe.model.image_directory is not None
        processes = (_EpisodeProcess(config, recipe.ray.start_timeout_s, images=images) for _ in range(config.workers))
        self._processes = tuple(processes)
        self._episodes = itertools.count()

    async def start(self) -> None:
        """Starts the processes. Raises ConfigError, ProcessDied, DeadlineExceeded."""
        try:
            for process in self._processes:
                await process.pool.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        for process in self._processes:
            await process.pool.close()

    async def run(self, task: Task, session: Session) -> Trajectory:
        """Raises DeadlineExceeded, ProcessDied, the environment's errors, and as `play`."""
        # a process that cannot be restarted fails its episodes immediately, so it would always have the fewest
        usable = [p for p in self._processes if not p.pool.refuses] or self._processes
        process = min(usable, key=lambda p: len(p.episodes))
        episode = _GymnasiumEpisode(next(self._episodes), process, task)
        process.episodes.add(episode.number)
        try:
            return await play(episode, task, session, self._config, self._limits)
        finally:
            process.episodes.discard(episode.number)
            process.finished.append(episode.number)


class _EpisodeProcess:
    """`episodes`: in progress. `finished`: episodes whose end the process was not told yet."""

    def __init__(self, config: GymnasiumConfig, start_timeout_s: float, *, images: bool) -> None:
        self.episodes: set[int] = set()
        self.finished: list[int] = []
        self.pool = WorkerPool(
            WorkerSpec(
                name="environment process",
                module="asyncrl.environments.gymnasium_worker",
                labels=(config.id or config.factory,),
                settings=(config, images),
                asked=f"rollout.gymnasium.{f'id={config.id}' if config.id else f'factory={config.factory}'}",
                answer=EnvironmentReply,
                advice="make its steps shorter, or raise rollout.gymnasium.step_timeout_s",
                num_workers=1,
                timeout_s=config.step_timeout_s,
                start_timeout_s=start_timeout_s,
            )
        )

    async def ask(self, asked: str, **request: Any) -> EnvironmentReply:
        finished, self.finished = tuple(self.finished), []
        try:
            return await self.pool.call(GymnasiumRequest(finished=finished, **request), asked)
        except asyncio.CancelledError:
            # a call that is cancelled while it waits is never made; reporting an end twice is harmless
            self.finished += finished
            raise


class _GymnasiumEpisode:
    def __init__(self, number: int, process: _EpisodeProcess, task: Task) -> None:
        self.number = number
        self._process = process
        self._task = task

    async def reset(self) -> EnvironmentReply:
        seed = setting_of(self._task, "seed", int, self._task.ordinal)
        options = setting_of(self._task, "options", Mapping, None)
        return await self._process.ask("a reset", episode=self.number, seed=seed, options=options)

    async def act(self, response: str) -> EnvironmentReply:
        return await self._process.ask("an action", episode=self.number, response=response)
