"""Writes tasks of reasoning-gym as dataset files: `NAME_train.jsonl` and `NAME_test.jsonl`, which share no question.

    python tools/make_reasoning_gym.py --task chain_sum '{"max_terms": 3}' --train 2000 --test 200 --out data/sums
    python tools/make_reasoning_gym.py --task chain_sum 3 --task leg_counting 1 --train 2000 --test 200 --out data/mix

A task is a name, optionally a weight (its share of the rows), optionally its configuration as JSON. The same options
write the same bytes again. Reward `reasoning_gym` judges the rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.errors import explain
from asyncrl.rewards.reasoning_gym import make_dataset, record_of

MOST_DRAWS = 50
"""Draws for each row that is asked for, before a task counts as exhausted."""


@dataclass
class Task:
    name: str
    weight: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)


def parse_task(words: Sequence[str]) -> Task:
    """Raises ValueError: a word is neither a weight nor JSON."""
    task = Task(words[0])
    for word in words[1:]:
        value = json.loads(word)
        if isinstance(value, dict):
            task.config = value
        elif not isinstance(value, bool) and isinstance(value, int | float) and value > 0:
            task.weight = float(value)
        else:
            raise ValueError(f"{word} is neither a weight nor a configuration")
    return task


def distinct(task: Task, number: int, seed: int, taken: set[str]) -> list[dict[str, Any]]:
    """Rows of different questions, none of them in `taken`, which gets them. Raises ValueError: the task does not have
    so many."""
    found: list[dict[str, Any]] = []
    if not number:
        return found
    for row in rows(task, MOST_DRAWS * number, seed):
        if row["prompt"] in taken:
            continue
        taken.add(row["prompt"])
        found.append(row)
        if len(found) == number:
            return found
    asked = f"{number} different questions of {task.name} with {task.config}"
    do = "ask for fewer, or give the task a configuration with more"
    raise ValueError(explain(asked, f"{len(found)} in {MOST_DRAWS * number} draws", do))


def rows(task: Task, number: int, seed: int) -> Iterator[dict[str, Any]]:
    dataset = make_dataset(task.name, task.config, seed, number)
    for index in range(number):
        yield record_of(task.name, task.config, seed, index, dataset[index])


def shares(total: int, tasks: Sequence[Task]) -> list[int]:
    """`total` rows, split by the weights."""
    ends = [sum(task.weight for task in tasks[:n]) / sum(task.weight for task in tasks) for n in range(len(tasks) + 1)]
    return [round(total * b) - round(total * a) for a, b in itertools.pairwise(ends)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", action="append", required=True, metavar=("NAME", "WEIGHT CONFIG"))
    parser.add_argument("--train", type=int, default=2000, help="rows of the training set")
    parser.add_argument("--test", type=int, default=200, help="rows of the held-out set")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", required=True, help="path and start of the names of the two files")
    options = parser.parse_args(arguments)
    try:
        tasks = [parse_task(words) for words in options.task]
        parts: dict[str, list[dict[str, Any]]] = {"test": [], "train": []}
        taken: set[str] = set()  # two tasks may ask the same
        for task, train, test in zip(tasks, shares(options.train, tasks), shares(options.test, tasks), strict=True):
            found = distinct(task, train + test, options.seed, taken)
            parts["test"] += found[:test]
            parts["train"] += found[test:]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    for part, made in parts.items():
        path = Path(f"{options.out}_{part}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
        print(f"{path}: {len(made)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
