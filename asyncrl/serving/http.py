"""Pieces of HTTP that know nothing of models: bodies, keys, streams, and clients that leave."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from asyncrl.serving.errors import ApiError

T = TypeVar("T")

MAX_BODY_BYTES = 64 * 2**20


class ClientLeft(Exception):
    """The client closed its connection before the answer was complete."""


async def read_json(request: Request) -> object:
    """The body of `request`. Raises ApiError: not JSON, or too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes; send less at once")
    try:
        return json.loads(bytes(body))
    except ValueError as e:
        raise ApiError(400, f"the body is not JSON: {e}", code="invalid_json") from e


def require_key(request: Request, key: str | None) -> None:
    """Raises ApiError: `key` is set and the request does not carry it. Takes the same time whatever was sent."""
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(), key.encode())
    if scheme.lower() != "bearer" or not same:
        raise ApiError(401, "the API key is missing or wrong; send `Authorization: Bearer KEY`", code="invalid_api_key")


def error_response(error: ApiError) -> Response:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body(), error.status, headers)


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientLeft when the connection closes before; `work` is cancelled then."""
    task = asyncio.create_task(work)
    left = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. A client that leaves ends the stream: its generator is closed.

    Args:
        events: the data of each event.
        source: what `events` is made from. Both are closed when the response ends, however that is.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], source: AsyncGenerator[Any, None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._send(send))
        except (ClientLeft, OSError):
            pass  # nobody is there to be told
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
