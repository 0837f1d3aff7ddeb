"""A reward process: `python -m asyncrl.rewards.reward_worker NAME...`; the names are for people. Each request is a
(response, row) or a `GroupRequest`; the answer is a `RewardResult`, or a `GroupResult`, of plain numbers."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.rewards import build_reward
from asyncrl.rewards.group import GroupRequest, GroupResult, build_group_reward
from asyncrl.rewards.reward import RewardResult
from asyncrl.workers.worker_loop import serve

Request = tuple[str, PromptRow] | GroupRequest


def _scorer(config: RewardConfig) -> Callable[[Request], RewardResult | GroupResult]:
    reward, of_group = build_reward(config), build_group_reward(config.group)

    def score(request: Request) -> RewardResult | GroupResult:
        if isinstance(request, GroupRequest):
            assert of_group is not None, "the recipe has a group reward"
            return of_group(request)
        result = reward(*request)
        parts = tuple((str(name), float(value)) for name, value in result.parts)
        return RewardResult(float(result.reward), parts)

    return score


if __name__ == "__main__":
    serve(_scorer)
