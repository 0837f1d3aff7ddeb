"""Deadlines for waits of this process, and a record of its waits on other processes: the open ones, and how close ended
ones came to their deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from asyncrl.errors import DeadlineExceeded, Process, explain


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One wait on another process; `since_s` is monotonic."""

    call: str
    process: Process
    timeout_s: float
    since_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.call} of {self.process}"


@dataclass(frozen=True, slots=True)
class WaitTotals:
    """Waits that ended since the last `take`: the longest, and the largest fraction of a deadline used (1: missed).
    Waits with `FOREVER_S` are left out."""

    longest_s: float = 0.0
    deadline_used: float = 0.0


class Waits:
    """Owns the open waits of this process and the totals of the ended ones."""

    def __init__(self) -> None:
        self._open: set[Wait] = set()
        self._totals = WaitTotals()

    @contextlib.contextmanager
    def of(self, wait: Wait) -> Iterator[None]:
        self._open.add(wait)
        try:
            yield
        finally:
            self._open.discard(wait)
            took_s = time.monotonic() - wait.since_s
            if wait.timeout_s < FOREVER_S:
                totals = self._totals
                self._totals = WaitTotals(
                    max(totals.longest_s, took_s),
                    max(totals.deadline_used, took_s / wait.timeout_s if wait.timeout_s > 0 else 1.0),
                )

    def take(self) -> WaitTotals:
        totals, self._totals = self._totals, WaitTotals()
        return totals

    def lines(self) -> list[str]:
        """The open waits, longest first, one line each."""
        now = time.monotonic()
        found = sorted(self._open, key=lambda wait: wait.since_s)
        return [f"{now - w.since_s:8.1f} s of {w.timeout_s:g} s  {w}" for w in found]


@contextlib.asynccontextmanager
async def deadline(timeout_s: float, asked: str, *, found: str = "it has not ended", do: str) -> AsyncIterator[None]:
    """Raises DeadlineExceeded with this text if the body has not ended after `timeout_s`."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineExceeded(explain(f"{asked} within {timeout_s:g} s", found, do)) from error


FOREVER_S = 10 * 365 * 86400.0
"""Deadline of waits that last as long as the run; the answering process is monitored in another way."""

MESSAGE_QUEUE, ROLLOUTER, RUN_SERVER = Process("message queue"), Process("rollouter"), Process("server")


def trainer_rank(rank: int) -> Process:
    return Process("trainer rank", rank)


def replica(replica_id: int) -> Process:
    return Process("replica", replica_id)


WAITS = Waits()
"""Global like a logger, so that a failure report can find the waits of its process."""
