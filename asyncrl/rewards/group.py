"""Rewards of a whole group: a user's function of all responses to a prompt, or of each pair."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.config.rewards import GroupRewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.errors import ConfigError, explain
from asyncrl.registry import resolve
from asyncrl.rewards.custom import Awaiter, checked_result
from asyncrl.rewards.reward import RewardResult

_SIGNATURE = "(responses: list[str], row: PromptRow) -> one RewardResult or number for each response"
_PAIR_SIGNATURE = "(first: str, second: str, row: PromptRow) -> share in [0, 1] with which the first is better"


class GroupReward:
    """Calls the function once for a group. Async functions run in one event loop."""

    def __init__(self, config: GroupRewardConfig, function: Callable[..., Any]) -> None:
        self._config = config
        self._function = function
        self._awaiter = Awaiter()

    def __call__(self, responses: list[str], row: PromptRow) -> tuple[RewardResult, ...]:
        """Raises TypeError, ValueError: not one finite reward for each response."""
        if self._config.pairwise:
            return self._by_pairs(responses, row)
        asked = f"the group reward {self._config.function} of {row.origin}"
        given = self._awaiter.value(self._function(list(responses), row))
        do = "return a list with one reward for each response, in their order"
        if isinstance(given, str | bytes | dict) or not hasattr(given, "__iter__"):
            raise TypeError(explain(asked, f"{type(given).__name__} instead of a list", do))
        rewards = list(given)
        if len(rewards) != len(responses):
            raise ValueError(explain(asked, f"{len(rewards)} rewards for {len(responses)} responses", do))
        return tuple(checked_result(each, asked) for each in rewards)

    def _by_pairs(self, responses: list[str], row: PromptRow) -> tuple[RewardResult, ...]:
        """Compares each pair in both orders, so that a bias for the first place cancels out."""
        from asyncrl.rewards.pairwise import scored  # imports numpy, which other reward processes do not need

        count = len(responses)
        shares = [[0.5] * count for _ in range(count)]
        for i, j in itertools.permutations(range(count), 2):
            asked = f"the comparison {self._config.function} of responses {i} and {j} to {row.origin}"
            given = self._function(responses[i], responses[j], row)
            share = checked_result(self._awaiter.value(given), asked).reward
            if not 0 <= share <= 1:
                raise ValueError(explain(asked, f"{share:g}", "return a number from 0 to 1"))
            shares[i][j] = share
        return tuple(RewardResult(float(s)) for s in scored(shares, self._config.scores))


def build_group_reward(config: GroupRewardConfig) -> GroupReward | None:
    """The group reward of a recipe, if any. Raises ConfigError: not importable, or another signature."""
    if not config.function:
        return None
    found: Any = resolve("reward.group.function", config.function, {})
    try:
        inspect.signature(found).bind(*([None] * (3 if config.pairwise else 2)))
    except TypeError as error:
        signature = _PAIR_SIGNATURE if config.pairwise else _SIGNATURE
        asked = f"reward.group.function={config.function} with reward.group.pairwise={config.pairwise}".lower()
        raise ConfigError(explain(asked, f"it cannot be called so: {error}", f"name a function {signature}")) from error
    return GroupReward(config, found)


def added(reward: float, parts: Sequence[tuple[str, float]], name: str, weight: float, result: RewardResult) -> Any:
    """(reward + weight * result.reward, parts with the values of `result` under `name`)."""
    more = ((f"{name}.{part}", value) for part, value in result.parts)
    return reward + weight * result.reward, (*parts, (name, result.reward), *more)
