"""Total rewards of responses: the reward function's result plus the results of further scorers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from asyncrl.data.rows import PromptRow
from asyncrl.rewards.group import added
from asyncrl.rewards.reward import RewardResult
from asyncrl.rewards.reward_pool import RewardPool
from asyncrl.types import Trajectory

Scorer = Callable[[str, PromptRow], Awaitable[RewardResult]]
"""(text of a response, its row) -> its result."""
GroupScorer = Callable[[Sequence[np.ndarray], PromptRow], Awaitable[Sequence[RewardResult]]]
"""(token ids of each response of a group, their row) -> a result per response."""


class Scorers:
    """The reward function of a run and the scorers that its recipe adds."""

    def __init__(self, rewards: RewardPool, decode: Callable[[np.ndarray], str]) -> None:
        self._rewards = rewards
        self._decode = decode
        self._of_each: list[tuple[str, float, Scorer]] = []
        self._of_groups: list[tuple[str, float, GroupScorer]] = []

    def add(self, name: str, weight: float, scorer: Scorer) -> None:
        """Adds `weight` times its result to each reward, and its values as parts below `name`."""
        self._of_each.append((name, weight, scorer))

    def add_of_groups(self, name: str, weight: float, scorer: GroupScorer) -> None:
        """As `add`, of a scorer that sees all responses of a group."""
        self._of_groups.append((name, weight, scorer))

    async def score(self, response: str | np.ndarray, row: PromptRow) -> RewardResult:
        """The reward of one response, without group scorers. Raises the scorers' errors."""
        if not self._of_each:
            return await self._rewards.score(self._readable(response), row)
        text = response if isinstance(response, str) else self._decode(response)
        result = await self._rewards.score(text, row)
        for name, weight, scorer in self._of_each:
            result = RewardResult(*added(result.reward, result.parts, name, weight, await scorer(text, row)))
        return result

    async def with_group_rewards(self, trajectories: Sequence[Trajectory], row: PromptRow) -> list[Trajectory]:
        """The trajectories of one group with the results of group scorers added, validated. Raises the scorers'
        errors."""
        found = list(trajectories)
        for name, weight, scorer in self._of_groups:
            results = await scorer([trajectory.policy_ids for trajectory in found], row)
            for i, result in enumerate(results):
                reward, parts = added(found[i].reward, found[i].reward_parts, name, weight, result)
                found[i] = replace(found[i], reward=reward, reward_parts=parts).validate()
        return found

    async def by_function(self, responses: Sequence[np.ndarray], row: PromptRow) -> Sequence[RewardResult]:
        """The `GroupScorer` of `reward.group`."""
        return await self._rewards.score_group([self._readable(ids) for ids in responses], row)

    def _readable(self, response: str | np.ndarray) -> str | np.ndarray:
        """Token ids as text, if the reward processes cannot decode them."""
        return response if isinstance(response, str) or self._rewards.decodes else self._decode(response)
