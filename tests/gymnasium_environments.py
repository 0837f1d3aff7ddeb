"""Environments of gymnasium for tests. Importing this registers `tests.gymnasium_environments:Guess-v0`."""

import os
import string
import time

import gymnasium
import numpy as np
from gymnasium import spaces

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"


class Guess(gymnasium.Env):
    """A number between 0 and 99 is to be guessed. The nearer the guess, the higher the reward; some words do harm."""

    observation_space = spaces.Text(200)
    action_space = spaces.Text(12, charset=LETTERS)

    def __init__(self, most=99):
        self._most = most
        self._number = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        number = int(self.np_random.integers(0, self._most + 1))
        self._number = (options or {}).get("number", number)
        return f"Guess a number up to {self._most}.", {}

    def step(self, action):
        match action:
            case "hang":
                time.sleep(600)
            case "die":
                os._exit(9)
            case "raise":
                raise LookupError("no such number")
            case "process":
                return f"{os.getpid()}", 0.0, False, False, {}
        guess = int(action) if action.isdigit() else -1
        near = max(0.0, 1 - abs(guess - self._number) / 100)
        if guess == self._number:
            return "right", 1.0, True, False, {}
        return ("too low" if guess < self._number else "too high"), near, False, False, {}


class Grid(gymnasium.Env):
    """Observations that are no text, and actions that count from 1."""

    observation_space = spaces.Dict({"place": spaces.Box(0, 9, (2,), np.int64), "left": spaces.Discrete(10)})
    action_space = spaces.Discrete(3, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"place": np.array([1, 2]), "left": np.int64(seed)}, {}

    def step(self, action):
        return {"place": np.array([int(action), 0]), "left": np.int64(0)}, float(action), False, action == 3, {}


class Arm(gymnasium.Env):
    observation_space = spaces.Text(9)
    action_space = spaces.Box(-1, 1, (3,))


class Shown(gymnasium.Env):
    """Observations are pixels, of a random colour; with `draws`, the number of the step, beside its drawing."""

    observation_space = spaces.Box(0, 255, (32, 32, 3), np.uint8)
    action_space = spaces.Text(400, charset=string.printable)

    def __init__(self, steps=2, draws=False):
        self.render_mode, self._steps, self._draws, self._step = "rgb_array" if draws else None, steps, draws, 0

    def render(self):
        return np.full((32, 32, 3), 50 * self._step, np.uint8)

    def _seen(self):
        if self._draws:
            return f"step {self._step}"
        return np.broadcast_to(self.np_random.integers(0, 256, 3, np.uint8), (32, 32, 3))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._seen(), {}

    def step(self, action):
        self._step += 1
        return self._seen(), float(len(action) % 2), self._step == self._steps, False, {}


def make_shown(**settings):
    return Shown(**settings)


class Mission(Shown):
    """Drawn, with words."""

    def _seen(self):
        return {"mission": "find it", "steps": 3}


def make_mission():
    return Mission(draws=True)


def make_grid():
    return Grid()


def make_arm():
    return Arm()


def make_nothing():
    return "nothing"


def raises():
    raise OSError("its map is gone")


gymnasium.register("Guess-v0", Guess, disable_env_checker=True)
