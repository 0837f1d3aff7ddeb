"""TCP connections to actors for frequent calls. A call through Ray costs each side about 1 ms of CPU over several
threads; a call over a connection costs a tenth.

Ray still starts the actor, hands out the address, and reports how a process ended after its connection broke.
Before anything is unpickled, both ends prove that they know the connection's secret, which travels through Ray:

    client: its challenge -> actor: its challenge, its proof -> client: its proof -> client: CALL* / actor: ANSWER*

Connections are not encrypted. If Ray's calls are (RAY_USE_TLS), no connection is opened and calls go through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import inspect
import itertools
import os
import pickle
import secrets
import socket
import struct
import traceback
import weakref
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, cast

from asyncrl.remote.tasks import kept

CONNECT_S = 5.0
"""Longest time for a client to connect and complete the handshake."""
HANDSHAKE_S = 10.0
"""Longest time that an actor keeps an unauthenticated connection."""
MAX_STRANGERS = 1024
"""Maximum of unauthenticated connections; further ones are closed."""
IDLE_S = 60.0
"""A connection without calls is closed after IDLE_S to 2 * IDLE_S; the next call opens a new connection."""
_LENGTH = _NUMBER = struct.Struct("<Q")
_SIZE = 32
"""Bytes of a challenge, of a proof and of the secret."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""Seconds (TCP_USER_TIMEOUT: ms): a machine that vanished silently counts as lost after 30 s."""


class ConnectionEnded(Exception):
    """The connection has ended. An unanswered call may have been executed."""


@dataclass(frozen=True, slots=True)
class ConnectionAddress:
    """Where an actor listens, and the secret that authenticates both ends."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class HasConnections:
    """An actor whose public methods can be called over a connection too, in the same event loop as Ray's calls."""

    _opened: asyncio.Task[ConnectionServer] | None = None

    async def connection(self) -> ConnectionAddress | None:
        """Address of this actor's connection; None if calls must be encrypted. Raises OSError: it cannot listen."""
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
            return None
        if self._opened is None or (self._opened.done() and self._opened.exception() is not None):
            import ray  # here, so that actors can be imported without Ray

            self._opened = asyncio.create_task(serve(self, ray.util.get_node_ip_address()), name="open the connection")
        return (await asyncio.shield(self._opened)).address


@dataclass(frozen=True, slots=True)
class ConnectionServer:
    """A listening socket. Keep a reference: it closes with the last one, or with the event loop."""

    address: ConnectionAddress
    server: asyncio.Server


async def serve(actor: object, host: str) -> ConnectionServer:
    """Answers calls of `actor`'s public methods on `host`. Raises OSError: it cannot listen there."""
    secret, strangers = secrets.token_bytes(_SIZE), set[_End]()
    server = await asyncio.get_running_loop().create_server(lambda: _Answering(actor, secret, strangers), host, 0)
    return ConnectionServer(ConnectionAddress(host, server.sockets[0].getsockname()[1], secret), server)


async def connect(address: ConnectionAddress) -> Connection:
    """Raises OSError; TimeoutError; ConnectionEnded: no actor with this secret."""
    loop, end = asyncio.get_running_loop(), _Calling(address.secret)
    try:
        async with asyncio.timeout(CONNECT_S):
            await loop.create_connection(lambda: end, address.host, address.port)
            await end.proven
    except BaseException:
        end.close()
        raise
    return Connection(end, loop)


class Connection:
    """A client's handle of a connection, which closes when the handle is garbage-collected."""

    def __init__(self, end: _Calling, loop: asyncio.AbstractEventLoop) -> None:
        self._end = end
        weakref.finalize(self, _close_in, loop, end)

    @property
    def ended(self) -> bool:
        return self._end.ended

    async def wait_ended(self) -> None:
        await self._end.lost.wait()

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingAnswer:
        """Calls a method of the actor. The answer raises the method's exception, with the remote traceback as its
        `__cause__`, or ConnectionEnded."""
        return PendingAnswer(self._end.call(method, args, kwargs))


class PendingAnswer:
    """Awaitable result of a call. It can be awaited again after a wait was cancelled."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Any]:
        return (yield from asyncio.shield(self._future).__await__())


class _RemoteTraceback(Exception):
    """Carries the traceback text of the process that raised the error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _End(asyncio.Protocol):
    """One end of a connection. Messages are length-prefixed."""

    def __init__(self, secret: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._secret = secret
        self._challenge = secrets.token_bytes(_SIZE)
        self._arrived = bytearray()
        self._transport: asyncio.Transport | None = None
        self._is_proven = False
        self._late = loop.call_later(HANDSHAKE_S, self.close)
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop, which Ray uses, has a different type
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self._late.cancel()

    def close(self) -> None:
        self.ended = True
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        at = 0
        while not self.ended and len(self._arrived) >= at + _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._arrived, at)
            # A stranger must not make this process buffer more than a handshake message.
            if not self._is_proven and size > 2 * _SIZE:
                self.close()
                return
            end = at + _LENGTH.size + size
            if len(self._arrived) < end:
                break
            message = bytes(memoryview(self._arrived)[at + _LENGTH.size : end])
            at = end
            if self._is_proven:
                self._take(message)
            else:
                self._greeted(message)
        # The rest is an incomplete message.
        del self._arrived[:at]

    def send(self, message: bytes) -> None:
        if self._transport is not None and not self.ended:
            self._transport.write(_LENGTH.pack(len(message)) + message)

    def _greeted(self, message: bytes) -> None:
        """Handles a handshake message."""
        raise NotImplementedError

    def _take(self, message: bytes) -> None:
        """Handles a message of an authenticated peer."""
        raise NotImplementedError

    def _proof(self, end: bytes, challenge: bytes) -> bytes:
        return hmac.digest(self._secret, end + challenge, hashlib.sha256)

    def _check(self, proof: bytes, end: bytes) -> bool:
        """Closes the connection unless the peer knows the secret."""
        self._is_proven = hmac.compare_digest(proof, self._proof(end, self._challenge))
        if self._is_proven:
            self._late.cancel()
        else:
            self.close()
        return self._is_proven


class _Calling(_End):
    """The client's end. Owns the unanswered calls."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._called = False
        """A call was made since the last idle check."""
        self._idle: asyncio.TimerHandle | None = None
        self.proven: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(self._challenge)
        self._close_when_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost.set()
        if self._idle is not None:
            self._idle.cancel()
        # Every open call ends now; whether the actor executed it is unknown.
        calls, self._calls = [self.proven, *self._calls.values()], {}
        why = "the other side closed it" if exc is None else f"{type(exc).__name__}: {exc}"
        for future in calls:
            if not future.done():
                future.set_exception(ConnectionEnded(why))
                future.exception()  # marks it as retrieved: the caller may have given up

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        message = _packed(number := next(self._numbers), (method, args, kwargs))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.ended:
            future.set_exception(ConnectionEnded("the connection has ended"))
        else:
            self._called, self._calls[number] = True, future
            self.send(message)
        return future

    def _close_when_idle(self) -> None:
        if self._idle is not None and not self._called and not self._calls:
            self.close()
        else:
            self._called = False
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._close_when_idle)

    def _greeted(self, message: bytes) -> None:
        if self._check(message[_SIZE:], b"actor"):
            self.send(self._proof(b"client", message[:_SIZE]))
            if not self.proven.done():
                self.proven.set_result(None)

    def _take(self, message: bytes) -> None:
        future = self._calls.pop(_NUMBER.unpack_from(message)[0])
        if future.done():
            return
        try:
            returned, *content = pickle.loads(memoryview(message)[_NUMBER.size :])
            if returned:
                future.set_result(content[0])
                return
            error = _raised(*content)
        except Exception as unread:  # noqa: BLE001 - unpickling runs arbitrary code; the caller gets its error
            error = unread
        future.set_exception(error)
        future.exception()  # marks it as retrieved: the caller may have given up


class _Answering(_End):
    """The actor's end. Owns the calls in progress, which continue when the connection ends, like Ray's."""

    def __init__(self, actor: object, secret: bytes, strangers: set[_End]) -> None:
        super().__init__(secret)
        self._actor = actor
        self._greetings = 0
        self._strangers = strangers
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._strangers.add(self)
        if len(self._strangers) > MAX_STRANGERS:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._strangers.discard(self)

    def _greeted(self, message: bytes) -> None:
        self._greetings += 1
        if self._greetings == 1:
            self.send(self._challenge + self._proof(b"actor", message))
        else:
            self._check(message, b"client")
            self._strangers.discard(self)

    def _take(self, message: bytes) -> None:
        kept(self._tasks, self._answer(message), "answer")

    async def _answer(self, message: bytes) -> None:
        (number,) = _NUMBER.unpack_from(message)
        try:
            method, args, kwargs = pickle.loads(memoryview(message)[_NUMBER.size :])
            # The peer is authenticated, but only public methods are callable.
            if method.startswith("_"):
                raise AttributeError(f"{method} is not a public method")
            value = getattr(self._actor, method)(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            answer = _packed(number, (True, value))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - task boundary: the caller raises it
            answer = _packed(number, (False, *_told(error)))
        self.send(answer)


def _told(error: BaseException) -> tuple[bytes | None, str, str]:
    """What the caller rebuilds the error from: the pickled exception (None if it must not be re-raised), its text, its
    traceback."""
    written = None
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        with contextlib.suppress(Exception):  # whatever its own code raises
            written = pickle.dumps(error)
    text = traceback.format_exception_only(error)[0].strip()  # works even if its own str raises
    return written, text, "".join(traceback.format_exception(error))


def _raised(written: bytes | None, text: str, where: str) -> Exception:
    """The error as its original type if it can be unpickled here, else a RuntimeError."""
    error: Any = None
    if written is not None:
        with contextlib.suppress(Exception):  # whatever its own code raises; its type may not be installed here
            error = pickle.loads(written)
    if not isinstance(error, Exception):
        error = RuntimeError(text)
    error.__cause__ = _RemoteTraceback(where)
    return error


def _packed(number: int, content: tuple[Any, ...]) -> bytes:
    return _NUMBER.pack(number) + pickle.dumps(content, pickle.HIGHEST_PROTOCOL)


def _close_in(loop: asyncio.AbstractEventLoop, end: _End) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and its connections with it
        loop.call_soon_threadsafe(end.close)
