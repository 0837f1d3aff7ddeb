"""HTTP calls to one server, each with a deadline."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from asyncrl.config.serving import check_key
from asyncrl.errors import ConfigError, explain

_CONNECT_S = 10.0
_IDLE_S = 2.0
_TOLD_CHARS = 500


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call."""

    path: str
    body: Any = None
    params: dict[str, str] | None = None
    method: Literal["GET", "POST"] = "POST"


class Unreachable(Exception):
    """The connection failed or broke."""


class Unanswered(Exception):
    """No answer in time."""


class Refused(Exception):
    """An answer with a status other than 200."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"{path} answers {status}: {text[:_TOLD_CHARS]}")
        self.status = status


def read_key(variable: str) -> str | None:
    """The key in this environment variable; None if `variable` is empty. Raises ConfigError: it is not set."""
    if not variable:
        return None
    key = os.environ.get(variable)
    asked = f"rollout.remote.api_key_env={variable}"
    if key is None:
        do = f"export {variable} before the run starts, on a cluster before Ray starts on each machine"
        raise ConfigError(explain(asked, "this process has no such environment variable", do))
    check_key(key, asked=asked, do=f"set {variable} to the key of the servers")
    return key


class ServerClient:
    """The connections to one server. Calls and streams use separate pools, so that streams never delay calls."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs every request
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # Proxies of the environment are not meant for these servers.
        common: dict[str, Any] = {"base_url": self.url, "headers": headers, "trust_env": False}
        # vLLM closes idle connections after 5 s. Closing them earlier here avoids using one in that moment.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S)
        # After an answer of 500 the server closes the connection: each call, of which there are few, has its own.
        one_each = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._calls = httpx.AsyncClient(**common, limits=one_each)
        self._streams = httpx.AsyncClient(**common, limits=limits, timeout=httpx.Timeout(None, connect=_CONNECT_S))

    async def get(self, path: str, *, timeout_s: float, params: dict[str, str] | None = None) -> Any:
        """Returns the answer's JSON, or None if it is empty. Raises Unreachable, Unanswered, Refused."""
        return await self.send(Call(path, params=params, method="GET"), timeout_s)

    async def send(self, call: Call, timeout_s: float) -> Any:
        """As `get`."""
        path = call.path
        try:
            # One deadline for the whole call; httpx's timeouts are per operation.
            async with asyncio.timeout(timeout_s):
                answer = await self._calls.request(call.method, path, params=call.params, json=call.body, timeout=None)
        except TimeoutError as error:
            raise Unanswered(f"{path}: no answer within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise Unreachable(f"{path}: {type(error).__name__}: {error}") from error
        if answer.status_code != httpx.codes.OK:
            raise Refused(path, answer.status_code, answer.text)
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError:
            return answer.text

    async def call_workers(self, method: str, arguments: Sequence[Any], timeout_s: float, **named: Any) -> list[Any]:
        """Calls a method in each of the server's workers; returns their values. Raises the errors of `get`."""
        body = {"method": method, "args": list(arguments), "kwargs": named}
        answer = await self.send(Call("/collective_rpc", body), timeout_s)
        return [] if answer is None else answer["results"]

    async def lines(self, path: str, body: Any) -> AsyncIterator[str]:
        """Yields the lines of a streamed answer, without a deadline: the caller closes it when the server is lost.

        Raises Unreachable, Refused.
        """
        try:
            async with self._streams.stream("POST", path, json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise Refused(path, answer.status_code, (await answer.aread()).decode(errors="replace"))
                async for line in answer.aiter_lines():
                    yield line
        except httpx.HTTPError as error:
            raise Unreachable(f"{path}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Closes all connections; the server ends the requests behind them. Idempotent."""
        await self._calls.aclose()
        await self._streams.aclose()
