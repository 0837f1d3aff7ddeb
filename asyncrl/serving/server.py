"""Runs the HTTP server beside the watch over the fleet: when one ends, both end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from asyncrl.errors import RunFailed, explain
from asyncrl.serving.connection_guard import ConnectionGuard, GuardedConfig

logger = logging.getLogger("asyncrl.commands.serve")

END_TIMEOUT_S = 3.0
"""Time that the server has beyond its grace period to end the requests in progress."""


class Server(uvicorn.Server):
    """Serves `app` under the limits of `guard`. Leaves signals to the program that it serves in."""

    def __init__(self, app: Any, guard: ConnectionGuard, *, grace_s: int) -> None:
        super().__init__(GuardedConfig(app, guard, grace_s=grace_s))
        self._guard = guard

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()

        def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if not self._guard.on_error(context):
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

    Raises the error that ended one of them before `stop`; RunFailed when the server ended without an error.
    """
    grace_s = server.config.timeout_graceful_shutdown or 0
    try:
        await asyncio.wait([watching, serving, stop], return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not stop.done() and not watching.done():
            await serving
            raise RunFailed(explain("answer HTTP requests", "the HTTP server ended by itself", "see the log"))
        if stop.done():
            logger.info("stopping: requests in flight may take %d s", grace_s)
        server.should_exit = True
        await asyncio.wait([serving], timeout=grace_s + END_TIMEOUT_S)
        if watching.done():
            await watching
    finally:
        serving.cancel()
        watching.cancel()
        await asyncio.gather(watching, serving, return_exceptions=True)
