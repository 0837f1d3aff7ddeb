"""Deadlines for calls that cannot be interrupted (NCCL's): they run in a thread that can be abandoned."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any, ParamSpec, TypeVar

from asyncrl.errors import AsyncRLError, DeadlineExceeded, WeightTransferError, explain
from asyncrl.weights.transports.control_channel import Deadline

P = ParamSpec("P")
T = TypeVar("T")

_POLL_S = 0.02
"""Pause between two calls of a waiter's `watch`."""


class BlockingCalls:
    """One daemon thread that makes the submitted calls, one after the other.

    After `close` the thread ends when its current call returns, if ever; nothing waits for it. A call whose future was
    cancelled earlier is skipped.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], futures.Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._main, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> futures.Future[T]:
        future: futures.Future[T] = futures.Future()
        self._calls.put((call, future))
        return future

    async def do(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Awaits the call without blocking the event loop. The caller sets the deadline."""
        return await asyncio.wrap_future(self.submit(partial(call, *args, **kwargs)))

    def close(self) -> None:
        self._calls.put(None)

    def _main(self) -> None:
        while (item := self._calls.get()) is not None:  # ended by `close`
            call, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result, error = call(), None
            except BaseException as raised:  # noqa: BLE001 - task boundary: whoever waits for the call gets it
                result, error = None, _of_a_call(raised)
            # Before the waiter goes on, and perhaps ends the process: freeing a process group then aborts it.
            del item, call
            future.set_exception(error) if error else future.set_result(result)
            del future, result, error  # no reference to a finished transfer's tensors while idle


def _of_a_call(error: BaseException) -> Exception:
    """An error that a waiter may raise. StopIteration hangs an event loop, SystemExit and KeyboardInterrupt end it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    raised = RuntimeError(f"a call in a thread raised {error!r}")
    raised.__cause__ = error
    return raised


def wait_for(future: futures.Future[T], deadline: Deadline, what: str, watch: Callable[[], None]) -> T:
    """The result of a call, while `watch` is called every few milliseconds and may raise.

    Raises:
        DeadlineExceeded: the call has not returned in time; the message names `what`.
        WeightTransferError: the call raised an error that is not an AsyncRLError.
    """
    while not futures.wait((future,), min(_POLL_S, deadline.remaining_s())).done:
        watch()
        if not deadline.remaining_s():
            asked = f"{what} within {deadline.timeout_s:.1f} s"
            do = "look at the logs of the trainer and the replicas; NCCL_DEBUG=INFO says what NCCL does"
            raise DeadlineExceeded(explain(asked, "the call has not returned", do))
    try:
        return future.result()
    except AsyncRLError:
        raise
    except Exception as error:
        do = "look at the logs of the trainer and the replicas; the next publish forms a new group"
        raise WeightTransferError(explain(what, f"{type(error).__name__}: {error}", do)) from error
