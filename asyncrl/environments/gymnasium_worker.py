"""A process of the gymnasium environment: `python -m asyncrl.environments.gymnasium_worker NAME`; the name is for
people.

It holds the environments of many episodes and handles one request at a time. The environment of an ended episode is
reused for another one; an environment that raised is closed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncrl.config.environments import GymnasiumConfig
from asyncrl.environments.custom import make_custom
from asyncrl.environments.observation import MAX_TEXT_CHARS, EnvironmentReply, last_choice, last_match
from asyncrl.errors import ConfigError, GenerationError, explain
from asyncrl.registry import resolve
from asyncrl.workers.worker_loop import serve

if TYPE_CHECKING:
    import gymnasium

    from asyncrl.data.images import Shown

_HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class GymnasiumRequest:
    """A reset, or an action when there is a `response`.

    `finished`: episodes of this process that no longer need their environment. `options`: of the reset.
    """

    episode: int
    response: str | None = None
    seed: int = 0
    options: Mapping[str, Any] | None = None
    finished: tuple[int, ...] = field(default=())


def make_checked(config: GymnasiumConfig) -> gymnasium.Env[Any, Any]:
    """A new environment of the recipe. Raises ConfigError if the environment cannot be built or its actions have no
    text form."""
    import gymnasium
    from gymnasium import spaces

    asked = f"rollout.gymnasium.{f'factory={config.factory}' if config.factory else f'id={config.id}'}"
    make: Callable[..., Any] = partial(gymnasium.make, config.id)
    if config.factory:
        make = resolve("rollout.gymnasium.factory", config.factory, {})
    do = "correct the id, the factory or rollout.gymnasium.kwargs"
    made = make_custom(asked, lambda: make(**config.kwargs), do)
    if not isinstance(made, gymnasium.Env):
        found = f"it gives a {type(made).__name__}, no gymnasium.Env"
        raise ConfigError(explain(asked, found, "return a gymnasium.Env"))
    # The policy writes text, so an action must be text or the index or name of a choice.
    space, names = made.action_space, config.actions
    if not isinstance(space, spaces.Text | spaces.Discrete):
        do = "wrap it, in a factory of your own, so that it takes Text or Discrete actions"
        raise ConfigError(explain(asked, f"its action space is {space}", do))
    if names and not (isinstance(space, spaces.Discrete) and len(names) == space.n):
        found = f"{len(names)} names for its action space {space}"
        raise ConfigError(explain(f"rollout.gymnasium.actions={names}", found, "name each action of a Discrete space"))
    return made


class _Environments:
    def __init__(self, settings: tuple[GymnasiumConfig, bool]) -> None:
        """`settings`: of the recipe, and whether the policy reads images."""
        config, self._shows_images = settings
        self._config = config
        self._idle = [make_checked(config)]
        self._open: dict[int, gymnasium.Env[Any, Any]] = {}

    def __call__(self, request: GymnasiumRequest) -> EnvironmentReply:
        """Raises GenerationError: the episode is unknown here; the environment's errors."""
        for episode in request.finished:
            if (done := self._open.pop(episode, None)) is not None:
                self._idle.append(done)
        if request.response is None:
            self._open[request.episode] = self._idle.pop() if self._idle else make_checked(self._config)
        used = self._open.get(request.episode)
        if used is None:
            found = "the process that held its environment was ended, by another episode's deadline or by itself"
            raise GenerationError(explain("an action of an episode", found, "see the log of the run"))
        try:
            return self._reset(used, request) if request.response is None else self._act(used, request.response)
        except BaseException:
            del self._open[request.episode]
            with suppress(Exception):  # the earlier error is reported, not this one
                used.close()
            raise

    def _reset(self, env: gymnasium.Env[Any, Any], request: GymnasiumRequest) -> EnvironmentReply:
        options = None if request.options is None else dict(request.options)
        return EnvironmentReply(self._seen(env, env.reset(seed=request.seed, options=options)[0]))

    def _act(self, env: gymnasium.Env[Any, Any], response: str) -> EnvironmentReply:
        found = last_match(response, self._config.action_pattern).strip()
        action = self._action(env.action_space, found)
        if action is None:
            return EnvironmentReply(self._refusal(env.action_space, found), accepted=False)
        observation, reward, terminated, truncated, _ = env.step(action)
        return EnvironmentReply(self._seen(env, observation), float(reward), bool(terminated or truncated))

    def _seen(self, env: gymnasium.Env[Any, Any], observation: Any) -> Shown:
        """The observation for the policy; with images, its pixels and those of an `rgb_array` rendering."""
        if not self._shows_images or env.render_mode == "ansi":
            return _text(env, observation)
        from asyncrl.data.images import is_pixels, shown

        if env.render_mode == "rgb_array":
            observation = env.render() if is_pixels(observation) else [env.render(), observation]
        return shown(observation, partial(_text, env))

    def _action(self, space: Any, found: str) -> Any:
        from gymnasium import spaces

        if isinstance(space, spaces.Text):
            return found if space.contains(found) else None
        return last_choice(found, int(space.start), int(space.n), self._config.actions)

    def _refusal(self, space: Any, found: str) -> str:
        from gymnasium import spaces

        shown = repr(found[-_SHOWN_CHARS:]) if found else "nothing"
        if isinstance(space, spaces.Text):
            letters = f"{space.min_length} to {space.max_length} characters of {space.characters!r}"
            return f"Error: {shown} is no action. An action has {letters}."
        last = int(space.start + space.n) - 1
        known = ", ".join(self._config.actions) or f"the whole numbers from {int(space.start)} to {last}"
        return f"Error: {shown} names no action. The actions are {known}."


def _text(env: gymnasium.Env[Any, Any], observation: Any) -> str:
    """The observation as text, truncated to MAX_TEXT_CHARS: strings unchanged, a text rendering if the environment has
    one (highlights in brackets), otherwise JSON."""
    if isinstance(observation, str):
        return observation[:MAX_TEXT_CHARS]
    if env.render_mode == "ansi":
        return _HIGHLIGHT.sub(r"[\1]", str(env.render())).strip("\n")[:MAX_TEXT_CHARS]
    return json.dumps(observation, default=_plain)[:MAX_TEXT_CHARS]


def _plain(value: Any) -> Any:
    """A JSON value: numpy arrays and numbers converted, anything else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


if __name__ == "__main__":
    serve(_Environments)
