"""Runs user code in the rollouter's event loop: environments, agents, and the tasks that they start."""

from __future__ import annotations

import asyncio
import logging
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from asyncrl.errors import DeadlineExceeded, explain
from asyncrl.remote.tasks import LimitedEvent, kept
from asyncrl.rollout.active_clock import ActiveClock

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAVE_S = 1.0
"""Longest wait for a cancelled call, which may run on afterwards: a stop has only 3 s in all."""

_OF_USER: ContextVar[bool] = ContextVar("asyncrl_of_user", default=False)
"""True in every task that a call has started."""


class UserCode:
    """Runs each call in a task of its own, and owns it while it lives. Belongs to one event loop.

    Every error of a call reaches its caller as an `Exception`. Otherwise `SystemExit` and `KeyboardInterrupt` would end
    the event loop, and a `CancelledError` (of a cancelled helper task, or of a cancel scope left in the wrong order)
    would look like a cancellation of the caller. In tasks started by a call, the first two become the exception of that
    task.

    Not contained: callbacks of the event loop that raise `SystemExit`, `loop.stop()`, `os._exit`, signals, and code
    that cancels tasks of others. They end the rollouter.
    """

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[Any]] = set()
        self._left: set[asyncio.Task[Any]] = set()
        """Tasks that ignored their cancellation."""
        self._started: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        """Tasks started by calls."""
        self._loop = loop = asyncio.get_running_loop()
        self._former = loop.get_task_factory()
        loop.set_task_factory(self._new_task)

    async def call(self, asked: str, code: str, work: Callable[[], Awaitable[T]], *, clock: ActiveClock, do: str) -> T:
        """The result of `work()`. A cancellation of this call cancels the work.

        Args:
                asked, do: parts of the message of DeadlineExceeded; `code` names whose code it is.
                clock: limits the call, excluding its wait for a place at a replica.

            Raises:
                DeadlineExceeded: the clock ran out. The cause says where the call was.
                RuntimeError: the call raised a BaseException that is not an Exception; it is the cause.
                Exception: the error of the call.
        """
        task = kept(self._calls, _outcome(work), code)
        ended, late = LimitedEvent(), False
        task.add_done_callback(lambda _: ended.set())
        try:
            while not task.done() and not late:
                await ended.wait(clock.look_s())
                late = not task.done() and clock.left_s <= 0
        finally:
            if not task.done():
                await self._leave([task])
        value, error = _result(task)
        if late:
            found = f"{code} took more than {clock.limit_s:g} s"
            raise DeadlineExceeded(explain(asked, found, do)) from error
        if error is None:
            return value
        raise error if isinstance(error, Exception) else escaped(error, code) from error

    async def close(self) -> None:
        """Cancels every call and its tasks. Returns within `LEAVE_S`, even if they do not end."""
        known = {*self._calls, *self._started} - self._left
        await self._leave([task for task in known if not task.done()])
        if self._loop.get_task_factory() == self._new_task:
            self._loop.set_task_factory(self._former)

    async def _leave(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Cancels these tasks; abandons a task that ignores it."""
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LEAVE_S)
        for task in tasks:
            if not task.done():
                logger.warning("%s goes on %g s after it was cancelled: nobody waits for it", task.get_name(), LEAVE_S)
                self._left.add(task)
                task.add_done_callback(self._left.discard)

    def _new_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Future[Any]:
        """The task factory of the loop."""
        users = _OF_USER.get()
        work = _Guarded(work) if users else work
        task: Any = self._former(loop, work, **options) if self._former else asyncio.Task(work, loop=loop, **options)
        if users:
            self._started.add(task)
        return task


def run_to_its_end(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, for a program with user code. `asyncio.run` waits without limit for tasks that ignore their
    cancellation; here they are abandoned after `LEAVE_S`."""
    runner = asyncio.Runner()
    try:
        return runner.run(main)
    finally:
        runner.run(_end_the_others())
        runner.get_loop().close()  # `runner.close()` would wait for the abandoned tasks
        asyncio.set_event_loop(None)


async def _end_the_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=LEAVE_S)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def escaped(error: BaseException, code: str) -> RuntimeError:
    """Replaces an exception that would end more than the attempt; raise it from `error`."""
    return RuntimeError(f"{code} raised {type(error).__name__}, which is no Exception: it counts as one")


def summary(error: BaseException) -> str:
    """Type and message of the error, without its notes; works even if its `str` raises."""
    return traceback.format_exception_only(error)[0].strip()


async def _outcome(work: Callable[[], Awaitable[T]]) -> tuple[T | None, BaseException | None]:
    """The outermost frame of a call: no exception leaves it."""
    _OF_USER.set(True)
    try:
        return await work(), None
    except BaseException as error:  # noqa: BLE001 - task boundary: the caller raises it
        return None, error


def _result(task: asyncio.Task[tuple[Any, BaseException | None]]) -> tuple[Any, BaseException | None]:
    if not task.done():
        return None, None
    return (None, asyncio.CancelledError()) if task.cancelled() else task.result()  # cancelled before it started


class _Guarded(Coroutine[Any, Any, Any]):
    """The coroutine of a task started by a call: errors that would end the event loop leave it as RuntimeError.

    A wrapping coroutine function would not work: cancelled before its first step, it never starts the wrapped
    coroutine.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def send(self, value: Any) -> Any:
        try:
            return self._work.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise escaped(error, "a task") from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._work.throw(*error)
        except (SystemExit, KeyboardInterrupt) as thrown:
            raise escaped(thrown, "a task") from thrown

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)  # names and frames, for debuggers
