"""HTTP without models: reads bodies, checks keys and hosts, streams events, and detects disconnected clients."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from asyncrl.chat.fields import ApiError, json_value
from asyncrl.remote.tasks import cancel

T = TypeVar("T")

MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_S = 60.0
"""Longest time for a body to arrive."""
RETRY_AFTER_S = 1


STATUS_CLIENT_LEFT = 499
"""Nobody reads it: only in the metrics."""


class ClientLeft(Exception):
    """The client closed its connection before the answer was complete."""


async def read_json(request: Request, *, timeout_s: float = BODY_TIMEOUT_S) -> object:
    """The body of `request`. Raises ApiError: not JSON, not declared as JSON, not Unicode, too large, too deep or too
    slow; ClientLeft.

    Requiring the JSON content type keeps web pages out: a browser sends JSON to another origin only with permission,
    which this server never gives. Text, forms and untyped bodies need no permission.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        found = f"the content type is {kind[:60]!r}" if kind else "the content type is missing"
        raise ApiError(415, f"{found}; send `Content-Type: application/json`", code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes; send less at once")
    except ClientDisconnect:
        raise ClientLeft from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s; send it at once") from None
    try:
        text = body.decode("utf-8-sig")
        value = json_value(text)
        if re.search(r"\\u[dD]", text):  # half of a surrogate pair: no tokenizer accepts it
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError as e:
        found = "it holds a lone surrogate, which is no character" if isinstance(e, UnicodeEncodeError) else str(e)
        raise ApiError(400, f"the body is not JSON: {found}", code="invalid_json") from e
    return value


def key_of(request: Request) -> str:
    """The key of a request, in the header of OpenAI's or of Anthropic's clients; empty if there is none."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def require_key(request: Request, key: str | None) -> None:
    """Raises ApiError: `key` is set and the request does not carry it. Runs in constant time."""
    if key is not None and not hmac.compare_digest(key_of(request).encode(), key.encode()):
        raise ApiError(401, "the API key is missing or wrong; send `Authorization: Bearer KEY`", code="invalid_api_key")


def require_local_host(request: Request) -> None:
    """Raises ApiError: the request names a host other than this machine.

    A web page can make a browser resolve the page's own host name to this machine (DNS rebinding) and then read the
    answers. IP addresses, and names that only this machine gives itself, are safe.
    """
    host = request.headers.get("host", "localhost").strip().lower()
    name = re.sub(r":\d*$", "", host)
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        if name != "localhost" and not name.endswith(".localhost"):
            found = f"the Host header {host[:100]!r} is no address of this machine"
            do = "ask 127.0.0.1 or localhost, or give the server a key"
            raise ApiError(403, f"{found}; {do}", code="wrong_host") from None


def frame(data: Mapping[str, Any], event: str = "") -> str:
    """A server-sent event with JSON data, named if `event` is set."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data)}\n\n"


def error_response(error: ApiError, body: Mapping[str, Any] | None = None) -> Response:
    """`body`: in the form of an API other than OpenAI's."""
    later = {"retry-after": str(RETRY_AFTER_S)}
    headers = {401: {"www-authenticate": "Bearer"}, 429: later, 503: later}
    return JSONResponse(error.body() if body is None else body, error.status, headers.get(error.status))


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientLeft, after cancelling `work`, if the connection closes first."""
    task = asyncio.create_task(work)
    left = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        await cancel(task, left)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. If the client disconnects, the stream ends and its generator is closed.

    Args:
        events: the frame of each event.
        source: the generator behind `events`. Both are closed when the response ends for any reason.
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
            pass  # the client disconnected
        finally:
            # Closing the source aborts the generation behind it.
            await self._events.aclose()
            await self._source.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
