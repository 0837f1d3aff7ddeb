"""Shared by scripted servers of inference engines: a `FakeEngine` behind a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from asyncrl_testing.fake_engine import FakeEngine, FakeScript

Route = tuple[str, str, Callable[..., Any]]
"""(method, path, handler)."""


class ScriptedServer(ABC):
    """One server: `start`, then `stop` or, as a lost process, `kill`; another one may then take its port.

    Args:
        key: that requests of guarded paths need.
        lacks: paths of routes that it does not have.
    """

    label_path: ClassVar[str]
    """Path of a look for the label."""
    samples_path: ClassVar[str]
    """Path that samples."""

    def __init__(
        self, *, script: FakeScript | None = None, key: str | None = None, lacks: tuple[str, ...] = (), port: int = 0
    ) -> None:
        self.engine = FakeEngine(script or FakeScript(tick_s=0.001))
        self.label = "default"
        self.calls: list[str] = []
        """Paths, in the order of their requests; without the looks of a replica."""
        self.looks = 0
        """Requests of `label_path`."""
        self.fail_next: str | None = None
        """Path of a route whose next call answers 500."""
        self._key, self._lacks, self._port = key, lacks, port
        self._labels = ["default"]
        self.busy = asyncio.Lock()
        """Held while weights are loaded: what samples answers nothing else then."""
        self._serving: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    async def start(self) -> Self:
        await self.engine.start()
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(self._app(), log_level="error", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="scripted server")
        async with asyncio.timeout(20.0):
            while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.005)
        return self

    async def kill(self) -> None:
        """Nothing listens any more, and every connection breaks in the middle."""
        assert self._server is not None
        assert self._serving is not None
        for server in self._server.servers:
            server.close()
        self.break_connections()
        self._server.should_exit = self._server.force_exit = True
        async with asyncio.timeout(20.0):
            await self._serving
        await self.engine.stop()

    async def stop(self) -> None:
        if self._serving is not None and not self._serving.done():
            await self.kill()

    def break_connections(self) -> None:
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def swap_weights(self) -> None:
        """Samples with weights that were never published, under an unchanged label."""
        self._labels.append("default")
        await self.engine.commit(len(self._labels) - 1)

    async def _relabel(self, label: str) -> None:
        self.label = label
        self._labels.append(label)
        await self.engine.commit(len(self._labels) - 1)

    @abstractmethod
    def _routes(self) -> Sequence[Route]: ...

    @abstractmethod
    def _guards(self, path: str) -> bool:
        """Whether the path needs the key."""

    def _looks_at(self) -> Sequence[str]:
        """Paths that a replica asks all the time."""
        return ("/health", self.label_path)

    def _app(self) -> Any:
        app = FastAPI()
        for method, path, route in self._routes():
            app.add_api_route(path, route, methods=[method])

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
            await (refusal or app)(scope, receive, send)

        return guarded

    def _refusal(self, request: Request) -> Response | None:
        path = request.url.path
        self.looks += path == self.label_path
        if path not in self._looks_at():
            self.calls.append(path)
        if path in self._lacks:
            return JSONResponse({"detail": "Not Found"}, 404)
        guards = self._key is not None and self._guards(path)
        if guards and request.headers.get("authorization") != f"Bearer {self._key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if self.fail_next == path:
            self.fail_next = None
            return JSONResponse({"error": {"message": "scripted failure"}}, 500)
        return None
