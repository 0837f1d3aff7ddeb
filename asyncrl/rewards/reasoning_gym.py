"""Reward of reasoning-gym's verifiers, for the rows of tools/make_reasoning_gym.py and of `Entries`.

A row names its entry in `extra_info`: {task, config, seed, index}. The reward makes the entry again, since entries hold
what JSON cannot (dates, sets).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from random import Random
from typing import Any

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.errors import ConfigError, explain
from asyncrl.rewards.math import question_of
from asyncrl.rewards.math_reading import boxed
from asyncrl.rewards.reward import RewardResult

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class ReasoningGymReward:
    """The task's own score, from 0 to 1, of the answer in a response; 0 without one. `reward.reasoning_gym.answer`
    says where the answer is. Parts: `correct` (the score is 1), `answered`."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError: reasoning-gym is not installed."""
        try:
            import reasoning_gym  # noqa: F401 - half a second, for those who use it
        except ImportError as error:
            do = "pip install 'asyncrl[reasoning-gym]'"
            raise ConfigError(explain("reward reasoning_gym", f"{error.name} is not installed", do)) from error
        self._answer = _ANSWERS[config.reasoning_gym.answer]

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        answer = self._answer(response)
        score = 0.0 if answer is None else _score(answer, row)
        return RewardResult(score, (("correct", float(score >= 1)), ("answered", float(answer is not None))))


def check_entry(row: PromptRow) -> None:
    """Raises ValueError: the row names no entry of reasoning-gym, or one with another question."""
    asked, do = f"reward reasoning_gym of {row.origin}", "make the rows with tools/make_reasoning_gym.py"
    try:
        question = _entry(row)[1]["question"]
    except (KeyError, TypeError, ValueError, AssertionError, IndexError) as error:
        found = f"no entry of reasoning-gym ({type(error).__name__}: {error})"
        raise ValueError(explain(asked, found, do)) from error
    if question.strip() not in question_of(row):
        found = "its prompt is not the question of the entry: the rows are of another version of reasoning-gym"
        raise ValueError(explain(asked, found, do))


class Entries:
    """A generator for `data.train`: entries without end. `data.options` is {tasks: {NAME: {weight: 1, config: {}}}}."""

    def __init__(self, seed: int, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises ValueError: no task, one that reasoning-gym does not have, or a configuration that it refuses."""
        if not tasks:
            raise ValueError("tasks is empty: name one as {chain_sum: {}}")
        if unknown := {key for task in tasks.values() for key in task} - {"weight", "config"}:
            raise ValueError(f"a task has weight and config, not {', '.join(sorted(unknown))}")
        self._seed = seed
        self._weights = {name: float(task.get("weight", 1.0)) for name, task in tasks.items()}
        self._configs = {name: dict(task.get("config", {})) for name, task in tasks.items()}
        for name, config in self._configs.items():
            make_dataset(name, config, seed, 1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (name,) = Random(f"{self._seed} {index}").choices([*self._weights], [*self._weights.values()])
        # A seed for each row instead of an index: some tasks make all entries up to the index.
        config, seed = self._configs[name], Random(f"{self._seed} {index} seed").getrandbits(31)
        return record_of(name, config, seed, 0, make_dataset(name, config, seed, 1)[0])


def record_of(task: str, config: Mapping[str, Any], seed: int, index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The row of an entry, as an object of a dataset file."""
    answer = entry["answer"]
    return {
        "prompt": entry["question"],
        "answer": None if answer is None else str(answer),
        "data_source": f"reasoning_gym/{task}",
        "extra_info": {"task": task, "config": dict(config), "seed": seed, "index": index},
    }


def make_dataset(task: str, config: Mapping[str, Any], seed: int, size: int) -> Any:
    """The dataset of a task. Raises ValueError: there is no such task, or it refuses the configuration."""
    import reasoning_gym

    tasks = reasoning_gym.factory.DATASETS
    if task not in tasks:
        close = difflib.get_close_matches(task, tasks, n=3, cutoff=0.5)
        do = f"name one of {', '.join(close or sorted(tasks))}"
        raise ValueError(explain(f"the task {task}", "reasoning-gym has no such task", do))
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **config)
    except (TypeError, ValueError, AssertionError) as error:
        found = f"the task refuses it: {error}"
        raise ValueError(explain(f"{task} with {dict(config)}", found, "correct the configuration")) from error


def _score(answer: str, row: PromptRow) -> float:
    dataset, entry = _entry(row)
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    except Exception:  # noqa: BLE001 - some verifiers fail on what a policy may write
        return 0.0


def _entry(row: PromptRow) -> tuple[Any, dict[str, Any]]:
    extra = row.values()
    config = extra["config"]
    text = config if isinstance(config, str) else json.dumps(config, sort_keys=True)
    return _made(extra["task"], text, int(extra["seed"]), int(extra["index"]))


@lru_cache(maxsize=4096)  # the responses of a group share their entry
def _made(task: str, config: str, seed: int, index: int) -> tuple[Any, dict[str, Any]]:
    dataset = make_dataset(task, json.loads(config), seed, index + 1)
    return dataset, dataset[index]


def _in_tags(response: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    return found[-1].strip() if found else None


def _last_number(response: str) -> str | None:
    found = _NUMBER.findall(response)
    return found[-1].replace(",", "") if found else None


_ANSWERS: dict[str, Callable[[str], str | None]] = {
    "tags": _in_tags,
    "boxed": boxed,
    "last_number": _last_number,
    "whole": lambda response: response.strip() or None,
}
