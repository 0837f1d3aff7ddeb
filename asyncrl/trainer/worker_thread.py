"""A thread for work that blocks, beside an event loop that answers meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """Does one thing after the other, in the order of the calls. Unlike those of a ThreadPoolExecutor it keeps no
    process from ending: a collective whose peer is gone may take minutes."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises there. It is done even if nobody waits for it any more."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._work.put((done, partial(work, *args, **kwargs)))
        return await done

    def _run(self) -> None:
        while True:
            done, work = self._work.get()
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:  # noqa: BLE001 - thread boundary: whoever asked raises it
                error = raised
                if not isinstance(raised, Exception) or isinstance(raised, StopIteration):  # an event loop breaks on it
                    error = RuntimeError(f"what a thread did raised {raised!r}")
                    error.__cause__ = raised
            done.get_loop().call_soon_threadsafe(_settle, done, result, error)
            del done, work, result, error  # until the next call nothing of this one is held


def _settle(done: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if done.done():
        return  # nobody waits any more
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
