"""Reward 1 for a program that passes its tests in `asyncrl.workers.sandbox`; docs/rewards.md has the forms of tests."""

from asyncrl.rewards.code.reward import CodeReward, find_program

__all__ = ["CodeReward", "find_program"]
