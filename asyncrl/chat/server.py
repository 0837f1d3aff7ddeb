"""Runs the HTTP server concurrently with the watch over the fleet: when one ends, both end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from asyncrl.chat.connection_limits import BACKLOG, ConnectionLimiter, LimitedConfig
from asyncrl.errors import ConfigError, ProcessDied, RunFailed, explain
from asyncrl.remote.tasks import cancel
from asyncrl.remote.waits import deadline

logger = logging.getLogger("asyncrl.commands.serve")

LISTEN_S = 30.0
END_TIMEOUT_S = 3.0
"""Time to end the requests in progress, after the server's grace period."""


def bind(host: str, port: int, *, keys: str = "rollout.serve.") -> socket.socket:
    """A socket bound to that address, where clients may already queue. Raises ConfigError naming the keys with this
    prefix: the address is taken, or not of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # fails here if another process listens on the port
    except OSError as e:
        do = f"choose another {keys}port (0 takes a free one) or {keys}host"
        raise ConfigError(explain(f"{keys}host={host} {keys}port={port}", str(e), do)) from e
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL of a bound socket; with this machine's name if it listens on all addresses."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


class Server(uvicorn.Server):
    """Serves `app` under the limits of `limiter`. Installs no signal handlers."""

    def __init__(self, app: Any, limiter: ConnectionLimiter, *, grace_s: int) -> None:
        super().__init__(LimitedConfig(app, limiter, grace_s=grace_s))
        self._limiter = limiter

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def listen(self, listener: socket.socket, asked: str) -> None:
        """Serves at a bound socket, in the task `serving`; returns once it listens. Raises DeadlineExceeded,
        ProcessDied."""
        self.serving = asyncio.create_task(self.serve([listener]), name="http")
        do = "see the log of the run"
        async with deadline(LISTEN_S, asked, found="the HTTP server does not listen", do=do):
            while not self.started:
                if self.serving.done():
                    raise ProcessDied(explain(asked, repr(self.serving.exception()), do))
                await asyncio.sleep(0.005)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()

        def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if not self._limiter.on_error(context):
                (before or type(loop).default_exception_handler)(loop, context)

        loop.set_exception_handler(on_error)
        try:
            await super().serve(sockets)
        finally:
            loop.set_exception_handler(before)


async def serve_until(
    stop: asyncio.Future[Any], server: uvicorn.Server, serving: asyncio.Task[None], watching: asyncio.Task[None]
) -> None:
    """Runs the HTTP server and the watch over the fleet until `stop` is done, then ends both.

    Raises the error that ended either before `stop`; RunFailed if the server ended without an error.
    """
    grace_s = server.config.timeout_graceful_shutdown or 0
    try:
        await asyncio.wait([watching, serving, stop], return_when=asyncio.FIRST_COMPLETED)
        # The server must not end by itself: that is an error even without an exception.
        if serving.done() and not stop.done() and not watching.done():
            await serving
            raise RunFailed(explain("answer HTTP requests", "the HTTP server ended by itself", "see the log"))
        if stop.done():
            logger.info("stopping: requests in flight may take %d s", grace_s)
        # uvicorn finishes the requests in progress within its grace period; the rest is cancelled below.
        server.should_exit = True
        await asyncio.wait([serving], timeout=grace_s + END_TIMEOUT_S)
        if watching.done():
            await watching
    finally:
        await cancel(serving, watching)
