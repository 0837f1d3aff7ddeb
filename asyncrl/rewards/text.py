"""Rewards that compare texts: `exact`, `regex`; and `zero`, for runs that something else teaches."""

from __future__ import annotations

import re

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.errors import ConfigError, explain
from asyncrl.rewards.reward import RewardResult


def exact_reward(response: str, row: PromptRow) -> RewardResult:
    """1 if the response equals the ground truth up to surrounding and repeated whitespace, else 0."""
    correct = float(response.split() == row.ground_truth.split())
    return RewardResult(correct, (("correct", correct),))


# Reward 0, for runs that something else teaches: a group reward, a judge or a teacher.


def zero_reward(response: str, row: PromptRow) -> RewardResult:
    """0, whatever the response."""
    return RewardResult(0.0)


# Reward 1 for a response in which a regular expression matches.


_TRUTH = "{truth}"


class RegexReward:
    """Searches for `reward.pattern`, in which `{truth}` stands for the ground truth, taken literally."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError: the pattern is not a valid regular expression."""
        self._pattern = config.pattern
        try:
            re.compile(config.pattern.replace(_TRUTH, "0"))
        except re.error as error:
            do = "write a Python regular expression; in YAML put it between single quotes"
            raise ConfigError(explain(f"reward.pattern={config.pattern}", str(error), do)) from error

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        """1 when the pattern matches, else 0. Part: `correct`."""
        pattern = self._pattern.replace(_TRUTH, f"(?:{re.escape(row.ground_truth.strip())})")
        correct = float(re.search(pattern, response) is not None)
        return RewardResult(correct, (("correct", correct),))
