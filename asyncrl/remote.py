"""Waits on Ray actors: each has a deadline and a name, and what went wrong arrives as an error of `asyncrl.errors`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from asyncrl.errors import DeadlineExceeded, ProcessDied, explain


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One wait of this process on another one; `since_s` is monotonic."""

    call: str
    process: str
    timeout_s: float
    since_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.call} of {self.process}"


@dataclass(frozen=True, slots=True)
class WaitTotals:
    """Waits that ended since the last `take`: how many, the longest in seconds, and the largest share of its deadline
    that one used (1: it was missed). Waits without a real deadline are left out."""

    ended: int = 0
    longest_s: float = 0.0
    deadline_used: float = 0.0


class Waits:
    """The open waits of this process, and what ended ones took."""

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
                    totals.ended + 1,
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


FOREVER_S = 10 * 365 * 86400.0
"""The deadline of a wait that lasts as long as the run: something else watches the process that answers it."""

MESSAGE_QUEUE, ROLLOUTER = "message queue", "rollouter"
"""The names of these processes in errors and reports; the others are "trainer rank <i>" and "replica <i>"."""

ENDED_POLL_S = 0.05

WAITS = Waits()
"""What this process waits for. One per process, as its loggers are: whoever writes its state down finds it here."""


async def reply(ref: ray.ObjectRef, *, timeout_s: float, call: str, process: str) -> Any:
    """Returns the value of `ref`, awaited for at most `timeout_s` seconds.

    Args:
        call, process: what was called and who answers it, e.g. "train_step" of "trainer rank 0"; they name the error.

    Raises:
        DeadlineExceeded: no answer in time. The remote call is not cancelled: its owner decides what to do with it.
        ProcessDied: the process that answers is gone or cannot be reached.
        Exception: what the remote method raised, as its own type, with the remote traceback as its `__cause__`.
    """
    deadline = asyncio.timeout(timeout_s)
    wait = Wait(call, process, timeout_s)
    try:
        with WAITS.of(wait):
            async with deadline:
                return await ref
    except TimeoutError as error:
        if deadline.expired():
            raise _late(wait) from None
        _translate(error, wait)
    except RayError as error:
        _translate(error, wait)


def reply_now(ref: ray.ObjectRef, *, timeout_s: float, call: str, process: str) -> Any:
    """As `reply`, blocking: for the synchronous methods of an actor."""
    wait = Wait(call, process, timeout_s)
    try:
        with WAITS.of(wait):
            return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise _late(wait) from None
    except RayError as error:
        _translate(error, wait)


async def ended(ask: Callable[[], ray.ObjectRef], *, timeout_s: float, process: str) -> None:
    """Returns when a process that was killed is gone: `ask` calls a method of it that answers at once.

    Raises DeadlineExceeded.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            await reply(ask(), timeout_s=max(0.0, deadline - time.monotonic()), call="end", process=process)
        except ProcessDied:
            return
        if time.monotonic() > deadline:
            found = f"it still answers {timeout_s:g} s after it was killed"
            raise DeadlineExceeded(explain(f"the end of {process}", found, "kill it by hand")).of(process)
        await asyncio.sleep(ENDED_POLL_S)


def _late(wait: Wait) -> DeadlineExceeded:
    do = "see the process's log, or raise the timeout of this wait"
    return DeadlineExceeded(explain(str(wait), f"no answer within {wait.timeout_s:g} s", do)).of(wait.process)


def _translate(error: Exception, wait: Wait) -> NoReturn:
    """Raises the typed equivalent of an error that Ray delivered."""
    if isinstance(error, RayTaskError):
        cause: BaseException | None = error
        while isinstance(cause, RayTaskError):  # a remote method that itself waited on an actor nests them
            cause = cause.cause
        if isinstance(cause, Exception):
            raise cause from error
        raise error
    if isinstance(error, RayError):
        found = f"{type(error).__name__}: {str(error).strip()}"
        do = "see the process's log; a training run goes on from its last checkpoint with resume=auto"
        raise ProcessDied(explain(str(wait), found, do)).of(wait.process)
    raise error
