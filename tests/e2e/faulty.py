"""Environments and rewards that misbehave on purpose."""

import asyncio
import os
import sys
import time
from dataclasses import replace

import numpy as np

from asyncrl.environments.environment import SingleTurn
from asyncrl.rewards import RewardResult

ESCAPES = {4: "CancelledError", 8: "SystemExit", 9: "SystemExit"}
"""Prompts of `Misbehaves` of which something leaves that would end a task, an event loop, a process."""


class Misbehaves(SingleTurn):
    """Every fifth prompt raises, and every fifth from 2 hangs; prompt 3 is judged by a word; the first attempt of every
    seventh raises. Prompt 4 waits for a helper that was cancelled, prompt 8 exits, prompt 9 starts a task that does.
    The others give what a hasty user would: lists, and a numpy number as reward."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    async def run(self, task, session):
        if task.ordinal % 5 == 0 and task.index == 0:
            raise ValueError(f"no answer sheet for prompt {task.ordinal}")
        if task.ordinal % 5 == 2:
            await asyncio.Event().wait()
        if task.ordinal % 7 == 0 and task.ordinal not in self._seen:
            self._seen.add(task.ordinal)
            raise ConnectionError("the grader hung up")
        if task.ordinal == 4:
            helper = asyncio.create_task(asyncio.sleep(600))
            helper.cancel()
            await helper
        if task.ordinal == 8:
            sys.exit(3)
        if task.ordinal == 9:
            await asyncio.create_task(_exits())
        trajectory = await super().run(task, session)
        reward = "much" if task.ordinal == 3 and task.index == 0 else np.float32(trajectory.reward)
        return replace(trajectory, response_ids=trajectory.response_ids.tolist(), reward=reward)


async def _exits():
    sys.exit(3)


class HangsForEver(SingleTurn):
    async def run(self, task, session):
        await asyncio.Event().wait()


class Straggles(SingleTurn):
    """Some prompts come late, after a few others were trained, however slow the machine is."""

    async def run(self, task, session):
        began = time.monotonic()
        trajectory = await super().run(task, session)
        if task.ordinal % 4 == 1:
            await asyncio.sleep(max(5.0, 5 * (time.monotonic() - began)))
        return trajectory


def moody_reward(response, row):
    """Hangs on some rows, and takes its process down on others."""
    digit = int(row.ground_truth) % 10 if row.ground_truth.lstrip("-").isdigit() else 0
    if digit % 5 == 1:
        time.sleep(600)
    if digit % 5 == 2:
        os._exit(9)
    return RewardResult(float(len(response) % 2))


def odd_length(response, row):
    """Something to learn for a model that knows nothing."""
    return RewardResult(float(len(response) % 2))


def always_right(response, row):
    return RewardResult(1.0)


def slow_reward(response, row):
    """Takes far longer than what it judges, also where that is slow, and has something to learn."""
    time.sleep(0.5)
    return RewardResult(float(len(response) % 2))


class Drawn:
    """A generator of rows: another sum for each index."""

    def __init__(self, seed):
        self.seed = seed

    def __getitem__(self, index):
        a, b = 1 + index // 9, 1 + index % 9
        return {"prompt": f"Compute {a}+{b}", "answer": str(a + b)}


def late(response, row):
    """Right, but for one row after a minute only."""
    time.sleep(60 if row.ground_truth == "late" else 0)
    return 1.0
