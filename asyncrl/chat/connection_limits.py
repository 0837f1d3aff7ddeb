"""Limits the connections of one HTTP server, and drops clients that exceed the limits.

    accepted --> waits for a request head --> is answered --> the client has received the answer --> waits for a head
    ...

A waiting connection may be closed for a newer one; an answered one is closed only when its own time is over.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import uvicorn
from h11 import LocalProtocolError
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from asyncrl.errors import explain

logger = logging.getLogger(__name__)

BACKLOG = 128
"""Connections that may wait to be accepted; one turn of the event loop accepts as many."""
SPARE_CONNECTIONS = 256
"""Connections that may wait for a request, in addition to the answered requests."""
_SPARE_DESCRIPTORS = BACKLOG + 128
"""For connections of one turn, and for other files of the process."""
_LEAST_CONNECTIONS = 16
_TELL_EVERY_S = 60.0

Reason = Literal["malformed", "head", "room", "stalled", "deadline", "descriptors"]
REASONS: dict[Reason, str] = {
    "malformed": "what came was no HTTP and got status 400",
    "head": "no complete request head came in time",
    "room": "connections that waited for a request were closed to make room for newer ones",
    "stalled": "clients took nothing of their answer",
    "deadline": "answers were not taken in the longest time that a request may take",
    "descriptors": "no file descriptor was left to accept a connection with",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one server.

    `max_connections`: open concurrently. `response_timeout_s`: from a request's head until the client has received the
    last byte of its answer. `head_timeout_s`: from the connection, or the end of the previous answer, to the end of a
    request's head. `stall_timeout_s`: a client that receives no byte of its answer for this long counts as lost.
    """

    max_connections: int
    response_timeout_s: float
    head_timeout_s: float = 10.0
    stall_timeout_s: float = 60.0


class ConnectionLimiter:
    """Counts refusals, logs each reason at most once a minute, and keeps the list of waiting connections.

    Args:
        counts: refusals by reason.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        counts: Counter[Reason] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.counts: Counter[Reason] = Counter() if counts is None else counts
        self.waiting: dict[LimitedProtocol, None] = {}
        """Connections without a request in progress, in the order in which they began to wait."""
        self.quiet = logging.Logger("uvicorn.error", logging.ERROR)
        """Logger of the connections: uvicorn's warnings concern clients, and are counted here instead."""
        self.quiet.parent = logging.getLogger("uvicorn.error")
        self._clock = clock
        self._quiet_until: dict[Reason, float] = {}

    def count(self, reason: Reason) -> None:
        self.counts[reason] += 1
        now = self._clock()
        if now >= self._quiet_until.get(reason, now):
            self._quiet_until[reason] = now + _TELL_EVERY_S
            logger.warning("%s; %d so far, told once a minute", REASONS[reason], self.counts[reason])

    def make_room(self) -> None:
        """Closes the connection that has waited longest for a request."""
        longest = next(iter(self.waiting), None)
        if longest is not None:
            longest.drop("room")

    def on_error(self, context: dict[str, Any]) -> bool:
        """True if an error of the event loop concerns a connection that could not be accepted. asyncio would log one
        per place in the backlog, every second."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE) or "socket" not in context:
            return False
        self.count("descriptors")
        self.make_room()
        return True


class LimitedConfig(uvicorn.Config):
    def __init__(self, app: Any, limiter: ConnectionLimiter, *, grace_s: int) -> None:
        super().__init__(
            app,
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=grace_s,
        )
        self.limiter = limiter


class LimitedProtocol(H11Protocol):
    """One connection under the limits of its server."""

    def __init__(self, config: LimitedConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._limiter = config.limiter
        self._timers: dict[Reason, asyncio.TimerHandle] = {}
        self._served = self.app
        self.app = self._answer
        self.logger = config.limiter.quiet

    # -- called by asyncio and uvicorn ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Else the end of an answer waits for an acknowledgement; asyncio sets this only for sockets that name their
        # protocol.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=0)  # writing pauses until the client or the kernel has taken all bytes
        self._follow()
        if len(self.connections) > self._limiter.limits.max_connections:
            self._limiter.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        self._limiter.count("malformed")
        try:
            super().send_400_response(msg)
        except LocalProtocolError:  # during an answer
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._follow()
        self._expect_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel("stalled")
        self._follow()

    # ------------------------------------------------------------------------------------------------------------

    def drop(self, reason: Reason) -> None:
        """Closes the connection immediately, dropping unsent bytes."""
        self._forget()
        self._limiter.count(reason)
        self.transport.abort()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application with a `send` that returns once the client or the kernel has taken all bytes."""

        async def send_all(message: Message) -> None:
            await send(message)
            await self.flow.drain()

        timer = self.loop.call_later(self._limiter.limits.response_timeout_s, self.drop, "deadline")
        try:
            await self._served(scope, receive, send_all)
        finally:
            timer.cancel()

    def _follow(self) -> None:
        """Updates the limiter's list of waiting connections. The timeout for a head runs while the connection waits."""
        answered = self.cycle is not None and not self.cycle.response_complete
        if answered or self.flow.write_paused or self.transport.is_closing():
            self._limiter.waiting.pop(self, None)
            self._cancel("head")
        elif self not in self._limiter.waiting:
            self._limiter.waiting[self] = None
            self._start("head", self._limiter.limits.head_timeout_s, self.drop, "head")

    def _expect_progress(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._start("stalled", self._limiter.limits.stall_timeout_s, self._after_a_while, left)

    def _after_a_while(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._expect_progress()
        else:
            self.drop("stalled")

    def _start(self, reason: Reason, delay_s: float, call: Callable[..., None], argument: object) -> None:
        self._timers[reason] = self.loop.call_later(delay_s, call, argument)

    def _cancel(self, reason: Reason) -> None:
        if timer := self._timers.pop(reason, None):
            timer.cancel()

    def _forget(self) -> None:
        self._limiter.waiting.pop(self, None)
        for reason in tuple(self._timers):
            self._cancel(reason)


def connections_that_fit(wanted: int) -> int:
    """How many of `wanted` connections this process may have open. Raises its soft limit on file descriptors as far as
    they need it; warns when the hard one is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    used = len(os.listdir("/dev/fd"))
    needed = used + _SPARE_DESCRIPTORS + wanted
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    free = soft - used
    fit = max(_LEAST_CONNECTIONS, free - min(_SPARE_DESCRIPTORS, free // 2))
    if fit < wanted:
        found = f"the limit on file descriptors, {soft}, leaves room for {fit}"
        logger.warning("%s", explain(f"{wanted} connections at the same time", found, "raise it (ulimit -Hn)"))
    return min(wanted, fit)
