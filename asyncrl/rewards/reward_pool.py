"""Computes rewards in worker processes, which also decode the responses: decoding long ones would block the rollouter's
event loop.

A reward that takes longer than `reward.timeout_s` raises DeadlineExceeded, and its process is killed. The rollouter
then nacks the group: the timeout counts as a failed attempt, as any error of a reward does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow, Thinking
from asyncrl.rewards.reward import GroupRequest, Response, RewardRequest, RewardResult, RewardSettings
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
                settings=RewardSettings(config),
                asked=config.asked,
                answer=(RewardResult, tuple),
                advice="make the reward end on such a response, or raise reward.timeout_s",
                num_workers=config.workers,
                timeout_s=config.timeout_s,
                start_timeout_s=start_timeout_s,
                ahead=16,
            )
        )
        self._config = config
        self.decodes = False
        """Responses may be token ids."""

    def decode_with(self, decoder: str | None, ends: frozenset[int], thinking: Thinking) -> None:
        """Has the processes decode responses that are token ids, as `RewardSettings` says. Before `start`."""
        self.decodes = decoder is not None
        self._spec = replace(self._spec, settings=RewardSettings(self._config, decoder, ends, thinking))

    async def score(self, response: str | np.ndarray, row: PromptRow) -> RewardResult:
        """The reward of a response. Raises as `WorkerPool.call`."""
        return await self.call(RewardRequest(_sent(response), row), f"the reward of {row.origin}")

    async def score_group(self, responses: Sequence[str | np.ndarray], row: PromptRow) -> tuple[RewardResult, ...]:
        """The `reward.group` of each response of a group. Raises as `WorkerPool.call`."""
        request = GroupRequest(tuple(map(_sent, responses)), row)
        return await self.call(request, f"the group reward of {row.origin}")


def _sent(response: str | np.ndarray) -> Response:
    return response if isinstance(response, str) else np.asarray(response, np.int32).tobytes()
