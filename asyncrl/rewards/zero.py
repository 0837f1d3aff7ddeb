"""Reward 0, for runs that something else teaches: a group reward, a judge or a teacher."""

from __future__ import annotations

from asyncrl.data.rows import PromptRow
from asyncrl.rewards.reward import RewardResult


def zero_reward(response: str, row: PromptRow) -> RewardResult:
    """0, whatever the response."""
    return RewardResult(0.0)
