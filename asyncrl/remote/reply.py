"""Waits on Ray actors, with a deadline and a name; failures become errors of `asyncrl.errors`.

Imports Ray inside functions, so that code that calls actors can be imported and tested without Ray.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

from asyncrl.errors import DeadlineExceeded, Process, ProcessDied, explain
from asyncrl.remote.waits import WAITS, Wait

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.exceptions import RayError

ENDED_POLL_S = 0.05
SLEPT_S = 2.0
"""If a deadline is noticed this late, this process was stopped or blocked, so it checks for the answer once more."""


async def reply(ref: Awaitable[Any], *, timeout_s: float, call: str, process: Process) -> Any:
    """Returns the value of `ref` within `timeout_s` seconds.

    Args:
        ref: an ObjectRef or a `PendingAnswer`; both can be awaited again after a cancelled wait.
        call, process: named in errors.

    Raises:
        DeadlineExceeded: no answer in time. The remote call is not cancelled: its owner decides.
        ProcessDied: the process has died or cannot be reached.
        Exception: what the remote method raised, as its own type, with the remote traceback as its `__cause__`.
    """
    wait = Wait(call, process, timeout_s)
    with WAITS.of(wait):
        for limit_s in (timeout_s, SLEPT_S):
            deadline = asyncio.timeout(limit_s)
            try:
                async with deadline:
                    return await ref
            except TimeoutError as error:
                if not deadline.expired():
                    _translate(error, wait)
                if time.monotonic() - wait.since_s <= timeout_s + SLEPT_S:
                    break  # otherwise this process was late, and the answer may be there
            except _ray_error() as error:
                _translate(error, wait)
    raise _late(wait)


def reply_now(ref: ObjectRef, *, timeout_s: float, call: str, process: Process) -> Any:
    """Blocking `reply`, for synchronous methods of an actor."""
    import ray
    from ray.exceptions import GetTimeoutError

    wait = Wait(call, process, timeout_s)
    try:
        with WAITS.of(wait):
            return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise _late(wait) from None
    except _ray_error() as error:
        _translate(error, wait)


async def ended(ask: Callable[[], ObjectRef], *, timeout_s: float, process: Process) -> None:
    """Returns when a killed process has exited. `ask`: calls one of its methods that answers immediately.

    Raises DeadlineExceeded.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            await reply(ask(), timeout_s=max(0.0, deadline - time.monotonic()), call="end", process=process)
        except ProcessDied:
            return
        except DeadlineExceeded:
            raise
        except Exception:  # noqa: BLE001, S110 - any other answer: the process lives
            pass
        if time.monotonic() > deadline:
            found = f"it still answers {timeout_s:g} s after it was killed"
            raise DeadlineExceeded(explain(f"the end of {process}", found, "kill it by hand")).of(process)
        await asyncio.sleep(ENDED_POLL_S)


def _late(wait: Wait) -> DeadlineExceeded:
    do = "see the process's log, or raise the timeout of this wait"
    return DeadlineExceeded(explain(str(wait), f"no answer within {wait.timeout_s:g} s", do)).of(wait.process)


_MEMORY = re.compile(r"\S+ used / \S+ limit|actual memory used=\S+?(?=,)")


def _ray_error() -> type[RayError]:
    from ray.exceptions import RayError

    return RayError


def _translate(error: Exception, wait: Wait) -> NoReturn:
    """Raises the typed equivalent of an error that Ray delivered."""
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause: BaseException | None = error
        while isinstance(cause, RayTaskError):  # nested if the remote method waited on another actor
            cause = cause.cause
        if isinstance(cause, Exception):
            raise cause from error
        raise error
    if isinstance(error, RayError):
        text = str(error).strip()
        found, do = f"{type(error).__name__}: {text}", "see the process's log"
        if "running low on memory" in text:  # 50 lines, of which these numbers matter
            found = f"Ray killed it because the memory of its machine was full: {', '.join(_MEMORY.findall(text))}"
            do = "take less memory: trainer.max_tokens_per_microbatch, rollout.num_replicas (see asyncrl-doctor)"
        do += "; a training run goes on from its last checkpoint with resume=auto"
        raise ProcessDied(explain(str(wait), found, do)).of(wait.process)
    raise error
