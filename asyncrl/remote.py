"""Waits on Ray actors: each has a deadline, and what went wrong arrives as an error of `asyncrl.errors`."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from asyncrl.errors import DeadlineExceeded, ProcessDied, explain


async def reply(ref: ray.ObjectRef, *, timeout_s: float, what: str) -> Any:
    """Returns the value of `ref`, awaited for at most `timeout_s` seconds.

    Args:
        what: the call and the process that answers it, e.g. "train_step of trainer rank 0"; it names the error.

    Raises:
        DeadlineExceeded: no answer in time. The remote call is not cancelled: its owner decides what to do with it.
        ProcessDied: the process that answers is gone or cannot be reached.
        Exception: what the remote method raised, as its own type, with the remote traceback as its `__cause__`.
    """
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await ref
    except TimeoutError as error:
        if deadline.expired():
            raise _late(what, timeout_s) from None
        _translate(error, what)
    except RayError as error:
        _translate(error, what)


def reply_now(ref: ray.ObjectRef, *, timeout_s: float, what: str) -> Any:
    """As `reply`, blocking: for the synchronous methods of an actor."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise _late(what, timeout_s) from None
    except RayError as error:
        _translate(error, what)


def _late(what: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        explain(what, f"no answer within {timeout_s:g} s", "see the process's log, or raise the timeout of this wait")
    )


def _translate(error: Exception, what: str) -> NoReturn:
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
        raise ProcessDied(explain(what, found, do))
    raise error
