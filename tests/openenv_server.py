"""An OpenEnv server for tests: `python tests/openenv_server.py PORT` serves a number to be guessed."""

import sys
import time

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Answer(Observation):
    text: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._number = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number = (seed or 0) % 100
        return Answer(text="Guess a number up to 99.")

    def step(self, action, timeout_s=None, **kwargs):
        if action.guess == "raise":
            raise LookupError("no such number")
        if action.guess == "hang":
            time.sleep(60)
        guess = int(action.guess) if action.guess.isdigit() else -1
        near = max(0.0, 1 - abs(guess - self._number) / 100)
        if guess == self._number:
            return Answer(text="right", reward=near, done=True)
        return Answer(text="too low" if guess < self._number else "too high", reward=near)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Answer, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
