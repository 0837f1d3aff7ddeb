"""A reward process: `python -m asyncrl.rewards.reward_worker NAME...`; the names are for people. Each request is a
(response, row); the answer is a `RewardResult` of plain numbers."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.rewards import build_reward
from asyncrl.rewards.reward import RewardResult
from asyncrl.workers.worker_loop import serve


def _scorer(config: RewardConfig) -> Callable[[tuple[str, PromptRow]], RewardResult]:
    reward = build_reward(config)

    def score(request: tuple[str, PromptRow]) -> RewardResult:
        result = reward(*request)
        parts = tuple((str(name), float(value)) for name, value in result.parts)
        return RewardResult(float(result.reward), parts)

    return score


if __name__ == "__main__":
    serve(_scorer)
