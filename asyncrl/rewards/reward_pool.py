"""Computes rewards in worker processes.

A reward that takes longer than `reward.timeout_s` raises DeadlineExceeded, and its process is killed. The rollouter
then nacks the group: the timeout counts as a failed attempt, as any error of a reward does.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.rewards.group import GroupRequest, GroupResult
from asyncrl.rewards.reward import RewardResult
from asyncrl.workers.messages import WorkerSpec
from asyncrl.workers.worker_pool import WorkerPool


class RewardPool(WorkerPool):
    """A `WorkerPool` whose calls are rewards."""

    def __init__(self, config: RewardConfig, *, start_timeout_s: float = 60.0) -> None:
        super().__init__(
            WorkerSpec(
                name="reward process",
                module="asyncrl.rewards.reward_worker",
                labels=config.names,
                settings=config,
                asked=config.asked,
                answer=(RewardResult, GroupResult),
                advice="make the reward end on such a response, or raise reward.timeout_s",
                num_workers=config.workers,
                timeout_s=config.timeout_s,
                start_timeout_s=start_timeout_s,
                ahead=16,
            )
        )

    async def score(self, response: str, row: PromptRow) -> RewardResult:
        """The reward of a response. Raises what `WorkerPool.call` raises."""
        return await self.call((response, row), f"the reward of {row.origin}")

    async def score_group(self, responses: Sequence[str], row: PromptRow) -> tuple[RewardResult, ...]:
        """What `reward.group` gives each response of a group. Raises what `WorkerPool.call` raises."""
        request = GroupRequest(tuple(responses), row)
        result: GroupResult = await self.call(request, f"the group reward of {row.origin}")
        return result.rewards
