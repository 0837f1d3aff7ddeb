"""Rewards by name: pure functions that judge a response against its row."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from asyncrl.data.rows import PromptRow
from asyncrl.errors import ConfigError, explain
from asyncrl.registry import resolve
from asyncrl.rewards.exact import exact_reward
from asyncrl.rewards.math import math_reward
from asyncrl.rewards.reward import RewardFunction, RewardResult

REWARDS: dict[str, RewardFunction] = {"exact": exact_reward, "math": math_reward}

_SIGNATURE = "(response: str, row: PromptRow) -> RewardResult"


@dataclass(frozen=True, slots=True)
class CustomReward:
    """A user's reward function, checked at each call to give a RewardResult."""

    name: str
    function: RewardFunction

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        """Raises TypeError: the function gave something else."""
        result: object = self.function(response, row)
        if not isinstance(result, RewardResult):
            found = f"{type(result).__name__} instead of RewardResult"
            do = "return asyncrl.rewards.RewardResult(reward=...)"
            raise TypeError(explain(f"the reward {self.name} of {row.origin}", found, do))
        return result


def build_reward(name: str) -> RewardFunction:
    """The reward that `reward.function` names: a built-in one, or a function as `package.module:function`.

    Raises ConfigError: unknown name, nothing importable, or not a function of (response, row).
    """
    function = resolve("reward.function", name, REWARDS)
    if name in REWARDS:
        return function
    try:
        inspect.signature(function).bind("", None)
    except TypeError as error:
        found = f"it cannot be called with a response and a row: {error}"
        raise ConfigError(explain(f"reward.function={name}", found, f"name a function {_SIGNATURE}")) from error
    return CustomReward(name, function)


__all__ = ["REWARDS", "CustomReward", "RewardFunction", "RewardResult", "build_reward"]
