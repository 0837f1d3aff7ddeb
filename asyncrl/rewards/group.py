"""Rewards of a whole group: a user's function of all responses to a prompt, or of each pair.

Shape letters: G members. `wins[i, j]` is the share in [0, 1] with which i was found better than j, and
`wins[i, j] + wins[j, i] == 1`; the diagonal is not read.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from asyncrl.config.rewards import GroupRewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.errors import ConfigError, explain
from asyncrl.registry import resolve
from asyncrl.rewards.custom import Awaiter, checked_result
from asyncrl.rewards.reward import RewardResult

Scores = Literal["win_rate", "bradley_terry"]

PRIOR = 0.5
"""Draws that Bradley-Terry adds to each pair, so that a member that won everything has a finite strength."""
_ROUNDS = 200


def win_rates(wins: np.ndarray) -> np.ndarray:
    """[G] float64 in [0, 1]: mean of `wins[i, j]` over j != i. Raises ValueError: malformed wins."""
    wins = _checked(wins)
    np.fill_diagonal(wins, 0.0)
    return wins.sum(axis=1) / (len(wins) - 1)


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """[G] float64 in [0, 1]: the chance of each to be better than an average member, by the strengths s that make
    P(i better than j) = s_i / (s_i + s_j) likeliest.

    Differs from the win rate if opponents differ in strength: beating a strong member counts more.
    Source: Bradley and Terry (1952); the iteration of Hunter (2004), "MM algorithms", with `PRIOR` draws a pair.
    Raises ValueError: malformed wins.
    """
    wins = _checked(wins) + PRIOR / 2
    np.fill_diagonal(wins, 0.0)
    games, strength = wins + wins.T, np.ones(len(wins))
    for _ in range(_ROUNDS):
        strength = wins.sum(axis=1) / (games / (strength[:, None] + strength[None, :])).sum(axis=1)
        strength /= np.exp(np.log(strength).mean())
    return strength / (strength + 1)


SCORES = {"win_rate": win_rates, "bradley_terry": bradley_terry}


def scored(shares: np.ndarray | Sequence[Sequence[float]], scores: Scores) -> np.ndarray:
    """[G] float64: the scores of a group whose pairs were compared in both orders.

    Args:
        shares: [G, G], `shares[i, j]`: how much i was preferred when i stood first and j second.
    """
    given = np.asarray(shares, np.float64)
    return SCORES[scores]((given + 1 - given.T) / 2)


def _checked(wins: np.ndarray) -> np.ndarray:
    """A copy [G, G] float64."""
    wins = np.array(wins, np.float64)
    if wins.ndim != 2 or wins.shape[0] != wins.shape[1] or len(wins) < 2:
        raise ValueError(f"wins must be [G, G] with G >= 2; got {wins.shape}")
    beside = ~np.eye(len(wins), dtype=bool)
    if not ((wins >= 0) & (wins <= 1))[beside].all() or not np.allclose((wins + wins.T)[beside], 1):
        raise ValueError(f"wins must be shares in [0, 1] with wins[i, j] + wins[j, i] == 1; got {wins.tolist()}")
    return wins


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
