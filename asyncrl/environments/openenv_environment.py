"""Environments behind an OpenEnv server with actions as text, and observations as text or images.

Source: openenv 0.4 and newer; its `GenericEnvClient` speaks JSON over a WebSocket, one session for each episode.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncrl.config.environments import OpenEnvConfig
from asyncrl.config.recipe import Recipe
from asyncrl.data.images import shown
from asyncrl.environments.custom import require_package_of
from asyncrl.environments.environment import Session, Task, limits_of
from asyncrl.environments.episode import play, setting_of
from asyncrl.environments.observation import MAX_TEXT_CHARS, EnvironmentReply, last_tagged
from asyncrl.errors import ConfigError, DeadlineExceeded, GenerationError, Process, explain
from asyncrl.remote.tasks import kept
from asyncrl.types import Trajectory

if TYPE_CHECKING:
    from openenv.core.generic_client import GenericEnvClient

_SHOWN_CHARS = 60
_LEAVE_S = 2.0


def check_openenv(config: OpenEnvConfig) -> None:
    """Raises ConfigError: the package is missing, or no server is named. Connects to nothing."""
    require_package_of("openenv")
    if not config.url:
        do = "set rollout.openenv.url to the address of a server, http://HOST:PORT"
        raise ConfigError(explain("rollout.environment=openenv", "rollout.openenv.url is not set", do))


class OpenEnvEnvironment:
    """An episode is one session of the server. Its reset gets the seed of the row's extra_info, else the ordinal of the
    group, the same for all its trajectories."""

    def __init__(self, recipe: Recipe) -> None:
        self._config = config = recipe.rollout.openenv
        self._limits = limits_of(recipe)
        self._places = asyncio.Semaphore(config.max_sessions)
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Resets the environment once. Raises ConfigError: the server cannot be reached, or refuses."""
        try:
            async with self._places:
                episode = _OpenEnvEpisode(self._config, 0)
                try:
                    await episode.reset()
                finally:
                    await episode.leave()
        except (GenerationError, DeadlineExceeded) as error:
            asked = f"rollout.openenv.url={self._config.url}"
            raise ConfigError(explain(asked, str(error), "start the server, or correct the address")) from error

    async def close(self) -> None:
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def run(self, task: Task, session: Session) -> Trajectory:
        """Raises GenerationError, DeadlineExceeded: of the server; as `play`."""
        episode = _OpenEnvEpisode(self._config, setting_of(task, "seed", int, task.ordinal))
        await self._places.acquire()
        try:
            return await play(episode, task, session, self._config, self._limits)
        finally:
            # the cancellation of a trajectory may take only a second; the place is free once the server's session is
            leaving = kept(self._leaving, episode.leave(), "end of a session of OpenEnv")
            leaving.add_done_callback(lambda _: self._places.release())


class _OpenEnvEpisode:
    def __init__(self, config: OpenEnvConfig, seed: int) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self._config = config
        self._seed = seed
        self._client: GenericEnvClient = GenericEnvClient(
            base_url=config.url, connect_timeout_s=config.step_timeout_s, message_timeout_s=config.step_timeout_s
        )

    async def reset(self) -> EnvironmentReply:
        return self._read(await self._answer("reset", self._client.reset(seed=self._seed)))

    async def act(self, response: str) -> EnvironmentReply:
        text = last_tagged(response, self._config.action_tag).strip()
        action: Any = {self._config.action: text} if self._config.action and text else None
        if not self._config.action:
            with suppress(ValueError):
                action = json.loads(text)
        if not isinstance(action, dict):
            expected = "a text" if self._config.action else "one JSON object"
            tag = self._config.action_tag
            where = f" between <{tag}> and </{tag}>" if tag else ""
            shown = repr(text[-_SHOWN_CHARS:]) if text else "nothing"
            return EnvironmentReply(f"Error: {shown} is no action. Write {expected}{where}.", accepted=False)
        return self._read(await self._answer("step", self._client.step(action)))

    async def leave(self) -> None:
        with suppress(Exception):  # the session is not needed, and the server ends it with its connection
            async with asyncio.timeout(_LEAVE_S):
                await self._client.close()

    async def _answer(self, what: str, call: Awaitable[Any]) -> Any:
        config = self._config
        asked, process = f"{what} of the OpenEnv server {config.url}", Process("OpenEnv server")
        try:
            async with asyncio.timeout(config.step_timeout_s):
                return await call
        except TimeoutError:
            found = f"no answer within rollout.openenv.step_timeout_s={config.step_timeout_s:g}"
            raise DeadlineExceeded(explain(asked, found, "make its steps shorter, or raise that")).of(process) from None
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise GenerationError(explain(asked, found, "see the server's log")).of(process) from error

    def _read(self, result: Any) -> EnvironmentReply:
        seen = result.observation
        if self._config.observation:
            seen = seen.get(self._config.observation, "") if isinstance(seen, dict) else seen
        return EnvironmentReply(shown(seen, _text), float(result.reward or 0.0), bool(result.done))


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:MAX_TEXT_CHARS]
