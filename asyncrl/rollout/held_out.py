"""Held-out sets: every prompt is answered a number of times, by the serving replicas or by leased ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from asyncrl.data.row_table import RenderedPrompts
from asyncrl.errors import DeadlineExceeded, GenerationError, explain
from asyncrl.remote.tasks import cancel
from asyncrl.remote.waits import ROLLOUTER
from asyncrl.rollout.evaluation import Answer, summarise
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.user_code import summary
from asyncrl.types import EvalResult, Trajectory

logger = logging.getLogger(__name__)

TELL_S = 10.0
"""Time between two lines on the progress."""
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
    takes_part: bool = False,
) -> EvalResult:
    """Evaluates `samples` responses to every prompt. A response that raises counts as wrong and as failed. Logs the
    progress.

    Args:
        takes_part: at the deadline the result is that of the prompts answered by then, if there are some.
        lent: client of the leased replicas; the evaluation fails when the last one is lost. None: the serving replicas
            answer.

    Raises:
        GenerationError: every response failed, or the last of the lent replicas was lost.
        DeadlineExceeded: the evaluation took longer than `timeout_s`.
    """
    answers: dict[int, list[Answer | None]] = {}
    work = asyncio.create_task(_answer(name, prompts, attempt, samples, answers))
    telling = asyncio.create_task(_tell(name, len(prompts.rows), samples, answers))
    lost = asyncio.create_task(lent.watch()) if lent is not None else None
    # The loss of the last leased replica ends the wait early: its responses would only time out.
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait([work, lost] if lost else [work], return_when=asyncio.FIRST_COMPLETED)
            if lost is not None and lost.done():
                await lost
            await work
    except TimeoutError:
        if takes_part and _whole(answers, samples):
            return _summary(name, prompts, answers, samples, pass_at)
        asked = f"the evaluation of {name} within {timeout_s:g} s"
        found = f"{len(prompts.rows)} prompts with {samples} response(s) each were not all answered"
        do = "raise eval.timeout_s, or lower eval.max_prompts or eval.samples"
        raise DeadlineExceeded(explain(asked, found, do)).of(ROLLOUTER) from None
    # Both tasks end here, whichever came first: a left-over response would hold a replica of the next evaluation.
    finally:
        await cancel(work, telling, *([] if lost is None else [lost]))
    if lent is not None and not lent.loads:
        raise GenerationError(f"evaluation of {name}: the last of its replicas was lost")
    return _summary(name, prompts, answers, samples, pass_at)


async def _answer(
    name: str, prompts: RenderedPrompts, attempt: Attempt, samples: int, answers: dict[int, list[Answer | None]]
) -> None:
    """Adds the answers to each prompt as they come, None for a failed one."""
    slots = asyncio.Semaphore(CONCURRENCY)
    last = ""

    async def one(index: int, number: int) -> None:
        nonlocal last
        answer = None
        async with slots:
            try:
                answer = Answer.of(await attempt(index, number))
            except Exception as e:  # noqa: BLE001 - task boundary: one response of an evaluation, counted as failed
                logger.warning("evaluation of %s failed on %s: %s", name, prompts.rows[index].origin, summary(e))
                last = summary(e)
        answers.setdefault(index, []).append(answer)

    async with asyncio.TaskGroup() as group:
        for index in range(len(prompts.rows)):
            for number in range(samples):
                group.create_task(one(index, number))
    if not any(answer is not None for row in answers.values() for answer in row):
        raise GenerationError(f"evaluation of {name}: all {len(answers)} prompts failed; the last: {last}")


async def _tell(name: str, num_prompts: int, samples: int, answers: dict[int, list[Answer | None]]) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(TELL_S)
        came = [answer for row in answers.values() for answer in row]
        if came:
            total, spent = num_prompts * samples, time.monotonic() - began
            logger.info(
                "evaluation of %s: %d of %d responses, accuracy so far %.3f, about %.0f s left",
                *(name, len(came), total, sum(a is not None and a.correct for a in came) / len(came)),
                spent * (total - len(came)) / len(came),
            )


def _whole(answers: dict[int, list[Answer | None]], samples: int) -> list[int]:
    """The prompts with all their answers, one of which at least did not fail."""
    return [i for i, row in sorted(answers.items()) if len(row) == samples and any(a is not None for a in row)]


def _summary(
    name: str, prompts: RenderedPrompts, answers: dict[int, list[Answer | None]], samples: int, pass_at: list[int]
) -> EvalResult:
    whole = sorted(index for index, row in answers.items() if len(row) == samples)
    result = summarise(name, [answers[i] for i in whole], pass_at, [prompts.rows[i].messages for i in whole])
    return result if len(whole) == len(prompts.rows) else replace(result, num_asked=len(prompts.rows))
