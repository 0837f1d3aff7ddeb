"""Helpers for asyncio tasks: await several concurrently, end one at the end of a run, wait for an event with a
limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def concurrently(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all. The first exception cancels the others, and is raised once they have ended."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel(*tasks)
        raise


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels all, and returns when they have ended. Does not raise their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def kept(tasks: set[asyncio.Task[T]], work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A new task that `tasks` holds until it has ended: the event loop alone would not."""
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def wait_event(event: asyncio.Event, limit_s: float) -> None:
    """Returns once the event is set, or after `limit_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()


async def end(task: asyncio.Task[Any] | None, *, patience_s: float = 0.0) -> None:
    """Waits `patience_s` for the task, then cancels it. Logs its error instead of raising it: the run ends for another
    reason."""
    if task is not None:
        if patience_s:
            await asyncio.wait([task], timeout=patience_s)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Exception):
            logger.error("also: %s: %s", task.get_name(), outcome)


def retrieved(task: asyncio.Task[Any]) -> None:
    """Marks the error of a task as retrieved: its caller may have given up."""
    if not task.cancelled():
        task.exception()


class LimitedEvent:
    """An event for one waiting task, with a limit. `asyncio.Event` within `asyncio.timeout` costs three times the CPU
    time, and each response of a fleet waits a few times."""

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Idempotent."""
        self.is_set = True
        self._wake()

    async def wait(self, limit_s: float) -> None:
        """Returns once the event is set, or after `limit_s`; `is_set` says which."""
        if self.is_set:
            return
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        timer = loop.call_later(limit_s, self._wake)
        try:
            await self._waiting
        finally:
            timer.cancel()
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
