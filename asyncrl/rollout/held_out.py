"""Held-out sets: every prompt is answered a number of times, by the serving replicas or by leased ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.data.prompts import RenderedPrompts
from asyncrl.errors import DeadlineExceeded, GenerationError, explain
from asyncrl.remote.waits import ROLLOUTER
from asyncrl.rollout.evaluation import Answer, summarise
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.user_code import summary
from asyncrl.types import EvalResult, Trajectory

logger = logging.getLogger(__name__)

CONCURRENCY = 256
"""Most responses in progress concurrently."""

Attempt = Callable[[int, int], Awaitable[Trajectory]]
"""(index of the prompt, number of the response) -> the trajectory that the environment returned."""


async def answer_held_out(
    name: str,
    prompts: RenderedPrompts,
    attempt: Attempt,
    *,
    samples: int,
    pass_at: list[int],
    timeout_s: float,
    lent: GenerationClient | None = None,
) -> EvalResult:
    """Evaluates `samples` responses to every prompt. A response that raises counts as wrong and as failed.

    Args:
        lent: client of the leased replicas; the evaluation fails when the last one is lost. None: the serving replicas
            answer.

    Raises:
        GenerationError: every response failed, or the last of the lent replicas was lost.
        DeadlineExceeded: the evaluation took longer than `timeout_s`.
    """
    work = asyncio.create_task(_answers(name, prompts, attempt, samples))
    lost = asyncio.create_task(lent.watch()) if lent is not None else None
    # The loss of the last leased replica ends the wait early: its responses would only time out.
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait([work, lost] if lost else [work], return_when=asyncio.FIRST_COMPLETED)
            if lost is not None and lost.done():
                await lost
            answers = await work
    except TimeoutError:
        asked = f"the evaluation of {name} within {timeout_s:g} s"
        found = f"{len(prompts.rows)} prompts with {samples} response(s) each were not all answered"
        do = "raise eval.timeout_s, or lower eval.max_prompts or eval.samples"
        raise DeadlineExceeded(explain(asked, found, do)).of(ROLLOUTER) from None
    # Both tasks end here, whichever came first: a left-over response would hold a replica of the next evaluation.
    finally:
        ending: list[asyncio.Task[Any]] = [work] if lost is None else [work, lost]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
    if lent is not None and not lent.loads:
        raise GenerationError(f"evaluation of {name}: the last of its replicas was lost")
    return summarise(name, answers, pass_at, [row.messages for row in prompts.rows])


async def _answers(name: str, prompts: RenderedPrompts, attempt: Attempt, samples: int) -> list[list[Answer | None]]:
    slots = asyncio.Semaphore(CONCURRENCY)
    last = ""

    async def one(index: int, number: int) -> Answer | None:
        nonlocal last
        async with slots:
            try:
                return Answer.of(await attempt(index, number))
            except Exception as e:  # noqa: BLE001 - task boundary: one response of an evaluation, counted as failed
                logger.warning("evaluation of %s failed on %s: %s", name, prompts.rows[index].origin, summary(e))
                last = summary(e)
                return None

    async with asyncio.TaskGroup() as group:
        tasks = [[group.create_task(one(i, n)) for n in range(samples)] for i in range(len(prompts.rows))]
    answers = [[task.result() for task in row] for row in tasks]
    if not any(answer is not None for row in answers for answer in row):
        raise GenerationError(f"evaluation of {name}: all {len(answers)} prompts failed; the last: {last}")
    return answers
