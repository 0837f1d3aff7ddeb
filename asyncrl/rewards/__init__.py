"""Rewards by name: pure functions that judge a response against its row; `build_reward` builds a recipe's.

Runs in: reward processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow, Thinking
from asyncrl.errors import ConfigError, DataError, explain
from asyncrl.registry import resolve
from asyncrl.rewards.code import CodeReward
from asyncrl.rewards.code.forms import tests_of
from asyncrl.rewards.custom import CustomReward, as_reward
from asyncrl.rewards.math import check_truth, math_reward
from asyncrl.rewards.multiple_choice import multiple_choice_reward, true_letter
from asyncrl.rewards.numeric import NumericReward, true_number
from asyncrl.rewards.reasoning_gym import ReasoningGymReward, check_entry
from asyncrl.rewards.remote import RemoteReward
from asyncrl.rewards.reward import RewardFunction, RewardResult
from asyncrl.rewards.text import RegexReward, exact_reward, zero_reward

REWARDS: dict[str, Callable[[RewardConfig], RewardFunction]] = {
    "code": CodeReward,
    "exact": lambda config: exact_reward,
    "math": lambda config: math_reward,
    "multiple_choice": lambda config: multiple_choice_reward,
    "numeric": NumericReward,
    "reasoning_gym": ReasoningGymReward,
    "regex": RegexReward,
    "remote": RemoteReward,
    "zero": lambda config: zero_reward,
}

_CHECKS: dict[str, Callable[[PromptRow], object]] = {
    # name -> raises ValueError for a row that the reward cannot judge
    "code": tests_of,
    "math": check_truth,
    "multiple_choice": true_letter,
    "numeric": true_number,
    "reasoning_gym": check_entry,
}

_OF_TEXTS = ("exact", "math", "multiple_choice", "numeric", "regex")
"""Built-in rewards that compare with a ground truth that is a text or a number."""

_SIGNATURE = (
    "(response: str, row: PromptRow) -> RewardResult or number, which may be async; or one as verl or TRL call it: "
    "(data_source, solution_str, ground_truth, extra_info) or (prompts, completions, **columns)"
)


_WHOLE = ("remote", "zero")
"""Built-in rewards that get the whole response. The others judge what follows the policy's thoughts."""


@dataclass(frozen=True, slots=True)
class AfterThoughts:
    """A built-in reward of the text after the policy's thoughts; a thought without an end has none."""

    reward: RewardFunction
    thinking: Thinking

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        return self.reward(self.thinking.after(response, begun=row.thinks), row)


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The weighted sum of several rewards.

    Parts: each reward, unweighted, as `<name>`; its parts as `<name>.<part>`; `correct` of the first reward that has
    it.
    """

    rewards: tuple[tuple[str, float, RewardFunction], ...]

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        total = 0.0
        parts: list[tuple[str, float]] = []
        correct: float | None = None
        for name, weight, function in self.rewards:
            result = function(response, row)
            total += weight * result.reward
            parts.append((name, result.reward))
            for part, value in result.parts:
                if part != "correct":
                    parts.append((f"{name}.{part}", value))
                elif correct is None:
                    correct = value
        return RewardResult(total, (*([("correct", correct)] if correct is not None else []), *parts))


def build_reward(config: RewardConfig, thinking: Thinking | None = None) -> RewardFunction:
    """The reward of a recipe: `reward.function`, or the weighted sum of `reward.parts`. `thinking`: the marks of the
    policy's thoughts.

    Raises ConfigError: unknown name, not importable, not a function of (response, row), or an invalid setting.
    """
    marks = thinking or Thinking()
    if not config.parts:
        return _build("reward.function", config.function, config, marks)
    built = ((name, weight, _build("reward.parts", name, config, marks)) for name, weight in config.parts.items())
    return WeightedSum(tuple(built))


def check_rows(config: RewardConfig, rows: Iterable[PromptRow]) -> None:
    """Raises DataError, with file and line: a built-in reward of the recipe cannot judge a row."""
    checks = [_require_text] if any(name in _OF_TEXTS for name in config.names) else []
    checks += [_CHECKS[name] for name in config.names if name in _CHECKS]
    for row in rows if checks else ():
        for check in checks:
            try:
                check(row)
            except ValueError as error:
                raise DataError(f"{error} ({config.asked})") from error


def _require_text(row: PromptRow) -> None:
    """Raises ValueError: there is no ground truth, or it is a list, an object, true or false."""
    truth = row.truth()
    if truth == "" or isinstance(truth, list | dict | bool):
        found = f"the ground truth {row.ground_truth[:60]!r}" if truth else "no ground truth"
        do = "add it as a text or a number, or name a reward of your own, which gets row.truth()"
        raise ValueError(explain(f"the reward of {row.origin}", found, do))


def _build(key: str, name: str, config: RewardConfig, thinking: Thinking) -> RewardFunction:
    if name in REWARDS:
        # A pattern that has the marks is one for the thoughts too.
        is_whole = name in _WHOLE or (
            name == "regex" and any(mark in config.pattern for mark in (thinking.opening, thinking.closing))
        )
        return REWARDS[name](config) if is_whole else AfterThoughts(REWARDS[name](config), thinking)
    found: Any = resolve(key, name, REWARDS)
    try:
        return CustomReward(name, as_reward(found))
    except TypeError as error:
        why = f"it cannot be called with a response and a row: {error}"
        raise ConfigError(explain(f"{key}={name}", why, f"name a function {_SIGNATURE}")) from error
