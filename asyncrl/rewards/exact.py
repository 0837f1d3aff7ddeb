"""Reward 1 for exactly the right text."""

from __future__ import annotations

from asyncrl.data.rows import PromptRow
from asyncrl.rewards.reward import RewardResult


def exact_reward(response: str, row: PromptRow) -> RewardResult:
    """1 when the response is the ground truth but for surrounding and repeated whitespace, else 0."""
    correct = float(response.split() == row.ground_truth.split())
    return RewardResult(correct, (("correct", correct),))
