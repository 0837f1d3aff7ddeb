"""Calls to one Ray actor: each has a deadline, names the process that answers, and is checked against its method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, overload

import ray

from asyncrl.errors import Process
from asyncrl.remote.reply import ended, reply

ActorHandle: TypeAlias = Any
"""Ray's handle of an actor: its methods come from the actor's class at run time."""
P = ParamSpec("P")
T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
"""Longest time for a call; a long poll has its own wait on top."""


class ActorClient:
    """Owns the handle of an actor. Raises as `remote.reply.reply`."""

    def __init__(self, handle: ActorHandle, process: Process, *, group: str | None = None) -> None:
        """`group`: the actor's concurrency group in which the calls run; None: that of each method."""
        self.handle = handle
        self.process = process
        self._group = group

    @overload
    async def call(
        self,
        timeout_s: float,
        method: Callable[Concatenate[Any, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...
    @overload
    async def call(
        self, timeout_s: float, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    async def call(self, timeout_s: float, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What `method`, one of the actor's class, returns for these arguments within `timeout_s`."""
        name = method.__name__
        remote = getattr(self.handle, name)
        if self._group is not None:
            remote = remote.options(concurrency_group=self._group)
        return await reply(remote.remote(*args, **kwargs), timeout_s=timeout_s, call=name, process=self.process)

    def kill(self) -> None:
        """Ends the process, also a stopped one; its children go with it. Idempotent."""
        ray.kill(self.handle)

    async def ended(self, timeout_s: float, ping: Callable[..., Any]) -> None:
        """Returns when the killed process has exited. `ping`: a method that answers at once.

        Raises DeadlineExceeded.
        """
        await ended(getattr(self.handle, ping.__name__).remote, timeout_s=timeout_s, process=self.process)
