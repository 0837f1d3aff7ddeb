"""Calls to one Ray actor: each has a deadline, names the answering process in errors, and is type-checked against the
method."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, cast, overload

from asyncrl.errors import DeadlineExceeded, Process, explain
from asyncrl.remote.connection import Connection, ConnectionEnded, PendingAnswer, connect
from asyncrl.remote.reply import SLEPT_S, ended, reply
from asyncrl.remote.tasks import retrieved

logger = logging.getLogger(__name__)

ActorHandle: TypeAlias = Any
"""Ray's handle of an actor: its methods come from the actor's class at run time."""
A = TypeVar("A")
"""The class of an actor."""
P = ParamSpec("P")
T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
"""Longest time for a call; a long poll has its own wait on top."""
LINGERS_S = 10.0
"""Longest wait for a connection to end when Ray has reported the end of its process. Ray does so as soon as it has sent
the kill: a stopped process lives up to 6 s longer, and could wake. To a vanished machine it stays open for longer."""
LEAST_S = 5.0
"""Minimum time to wait for Ray's report on a process whose connection broke."""


class ActorClient(Generic[A]):
    """Owns the handle of an actor of class `A`; `call` takes methods of `A`. Raises the errors of
    `remote.reply.reply`."""

    def __init__(self, handle: ActorHandle, process: Process, *, is_direct: bool = False) -> None:
        """`is_direct`: the actor is a `HasConnections`; calls go in order over a connection, opened by the first."""
        self.handle = handle
        self.process = process
        self._connection = _ConnectionToActor(handle, process) if is_direct else None

    @overload
    async def call(
        self,
        timeout_s: float,
        method: Callable[Concatenate[A, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...
    @overload
    async def call(
        self, timeout_s: float, method: Callable[Concatenate[A, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    async def call(self, timeout_s: float, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls `method` on the actor; returns its value within `timeout_s`."""
        return await self._answer(timeout_s, method.__name__, args, kwargs)

    async def _answer(self, timeout_s: float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._connection is not None:
            return await self._over_connection(self._connection.call(timeout_s, name, args, kwargs), timeout_s, name)
        answer = getattr(self.handle, name).remote(*args, **kwargs)
        return await reply(answer, timeout_s=timeout_s, call=name, process=self.process)

    async def _over_connection(self, answer: Awaitable[Any], timeout_s: float, name: str) -> Any:
        began = time.monotonic()
        try:
            return await reply(answer, timeout_s=timeout_s, call=name, process=self.process)
        except ConnectionEnded as error:
            broken = str(error)
        left_s = max(LEAST_S, timeout_s - (time.monotonic() - began))
        # A call through Ray raises ProcessDied, with the cause, if the process has died.
        await reply(self.handle.connection.remote(), timeout_s=left_s, call=name, process=self.process)
        found = f"the connection to it broke ({broken}); it lives, and may have done what it was asked"
        do = "see the process's log, and the network between the machines"
        raise DeadlineExceeded(explain(f"{name} of {self.process}", found, do)).of(self.process)

    def kill(self) -> None:
        """Kills the process, even a stopped (SIGSTOP) one, and its children. Idempotent."""
        import ray  # here: see `remote.reply`

        ray.kill(self.handle)

    async def ended(self, timeout_s: float, ping: Callable[..., Any]) -> None:
        """Returns when the killed process has exited. `ping`: a method that answers immediately.

        Raises DeadlineExceeded.
        """
        await ended(getattr(self.handle, ping.__name__).remote, timeout_s=timeout_s, process=self.process)
        if self._connection is not None:
            await self._connection.ended(LINGERS_S)


class _ConnectionToActor:
    """The connection to an actor, opened by the first call and by the first one after it broke. If it cannot be opened,
    later calls go through Ray: retrying would use up the deadline of a health check."""

    def __init__(self, handle: ActorHandle, process: Process) -> None:
        self._handle = handle
        self._process = process
        self._connection: Connection | None = None
        self._goes_through_ray = False
        self._turn = asyncio.Lock()
        """Keeps calls that wait for the connection in order."""
        self._waiting: set[asyncio.Task[Any]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ConnectionToActor, (self._handle, self._process)  # the receiving process opens its own connection

    def call(self, timeout_s: float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[Any]:
        """Awaiting the result raises the method's exception, RayError or ConnectionEnded. The call is not sent if the
        connection opens only after the caller gave up, some time after `timeout_s`."""
        if not self._waiting and self._is_open:
            return self._begin(name, args, kwargs)
        given_up_at = time.monotonic() + timeout_s + 2 * SLEPT_S
        call = self._begin_in_turn(given_up_at, name, args, kwargs)
        task = asyncio.create_task(call, name=f"{name} of {self._process}")
        self._waiting.add(task)
        task.add_done_callback(retrieved)
        return PendingAnswer(task)

    async def _begin_in_turn(self, given_up_at: float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            async with self._turn:
                if not self._is_open:
                    await self._open()
                if time.monotonic() > given_up_at:
                    raise ConnectionEnded("it was opened too late for this call, which was not made")
                answer = self._begin(name, args, kwargs)
        finally:
            self._waiting.discard(cast(Any, asyncio.current_task()))
        return await answer

    async def ended(self, wait_s: float) -> None:
        """Waits for the end of the connection, at most `wait_s`: a stopped process holds it, until it has exited."""
        if self._connection is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._connection.wait_ended()

    @property
    def _is_open(self) -> bool:
        return self._goes_through_ray or (self._connection is not None and not self._connection.ended)

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[Any]:
        if self._connection is None:
            return getattr(self._handle, name).remote(*args, **kwargs)
        return self._connection.call(name, args, kwargs)

    async def _open(self) -> None:
        """Waits as long as Ray takes to start the actor; the waiting calls have their own deadlines. Raises
        RayError."""
        self._connection = None
        try:
            address = await self._handle.connection.remote()
            if address is not None:
                self._connection = await connect(address)
        except (OSError, ConnectionEnded, TimeoutError) as error:
            why = f"{type(error).__name__} {error}".strip()
            logger.warning("there is no connection to %s (%s): its calls go through Ray", self._process, why)
        self._goes_through_ray = self._connection is None
