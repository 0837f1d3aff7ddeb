"""The HTTP side of agents: one server at the recipe's address, one key per trajectory. The time limit of a trajectory
also limits its requests."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from asyncrl.chat import http
from asyncrl.chat.anthropic import COUNT_TOKENS, MESSAGES, without_length
from asyncrl.chat.connection_limits import ConnectionLimiter, ConnectionLimits
from asyncrl.chat.dialects import DIALECTS
from asyncrl.chat.fields import ApiError
from asyncrl.chat.reply import PING_S, Dialect, Reply, ping_of, written_parts
from asyncrl.chat.server import Server, address_of, bind, is_local
from asyncrl.config.environments import AgentConfig
from asyncrl.data.tool_calls import ToolCall
from asyncrl.environments.agent_requests import CHAT, parse_request, sent_parts
from asyncrl.environments.agent_session import AgentSession, Answering
from asyncrl.remote.tasks import cancel, end

logger = logging.getLogger(__name__)

MODEL = "policy"
KEY_HEADER = "x-trajectory-key"
"""Carries the trajectory's key, for clients whose own key is the same for all trajectories, also in the metadata of a
request. Takes precedence."""
_STOP_S = 3.0
_DIALECTS = {CHAT.path: CHAT, **DIALECTS}

Handler = Callable[[Dialect, "AgentSession", Request, object], Awaitable[Response]]


class AgentServer:
    """`url`: the base URL for OpenAI clients, as agents reach it.

    Args:
        config: the address to listen on, and the address that agents are given.
        limits: of its connections.
        names_in_bodies: the metadata of a request may have the key of a trajectory. Bodies are then read without one.
    """

    def __init__(self, config: AgentConfig, limits: ConnectionLimits, *, names_in_bodies: bool = False) -> None:
        self._names_in_bodies = names_in_bodies
        self.url = ""
        self._config = config
        self._for_this_machine = True
        self.limiter = ConnectionLimiter(limits)
        self._sessions: dict[str, AgentSession] = {}
        self._server: Server | None = None

    async def start(self) -> None:
        """Returns once the server listens. Raises ConfigError: the address is taken or not of this machine;
        DeadlineExceeded, ProcessDied."""
        config = self._config
        listener = bind(config.host, config.port, keys="rollout.agent.")
        self._for_this_machine = is_local(listener) and not config.advertise
        self.url = f"{address_of(listener)}/v1"
        if config.advertise:
            port = str(listener.getsockname()[1])
            self.url = config.advertise.replace("{host}", socket.gethostname()).replace("{port}", port)
        self._server = Server(self._app(), self.limiter, grace_s=1)
        await self._server.listen(listener, "serve agents")

    async def close(self) -> None:
        """Ends the server and its unfinished answers. Idempotent."""
        if self._server is not None:
            self._server.should_exit = True
            await end(self._server.serving, patience_s=_STOP_S)

    @contextmanager
    def open(self, session: AgentSession) -> Iterator[str]:
        """Yields a key; requests with it belong to the session."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]

    def _app(self) -> FastAPI:
        # Dialects by their paths, for errors of routes that do not exist too.
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, exception_handlers={HTTPException: _not_a_route})
        for path, dialect in _DIALECTS.items():
            app.add_route(path, partial(self._guarded, dialect, self._reply), methods=["POST"])
        app.add_route(COUNT_TOKENS, partial(self._guarded, MESSAGES, self._count), methods=["POST"])
        for path in ("/v1/models", "/v1/models/{id:path}"):
            app.add_route(path, partial(self._guarded, CHAT, self._models), methods=["GET"])
        return app

    async def _guarded(self, dialect: Dialect, handler: Handler, request: Request) -> Response:
        """Turns every error of `handler` into an answer in the form of its API."""
        session: AgentSession | None = None
        try:
            if self._for_this_machine:
                http.require_local_host(request)
            # Keys are random and live as long as their trajectory.
            session = self._sessions.get(request.headers.get(KEY_HEADER) or http.key_of(request))
            body: object = None
            if request.method == "POST" and (session is not None or self._names_in_bodies):
                body = await http.read_json(request)
                session = session or self._sessions.get(_named_in(body))
            if session is None:
                raise ApiError(401, "the API key belongs to no trajectory that is running", code="invalid_api_key")
            return await handler(dialect, session, request, body)
        except ApiError as error:
            named = dialect.renamed(error)
            if session is not None:
                session.refusals.append(named)
            return _refused(named, dialect)
        except http.ClientLeft:
            return Response(status_code=http.STATUS_CLIENT_LEFT)
        except Exception as error:  # task boundary: the agent gets an error answer, and its trajectory fails
            logger.exception("a request of an agent failed")
            if session is not None:
                session.failure = error
            return _refused(ApiError(500, f"{type(error).__name__}: {error}", code="internal_error"), dialect)

    async def _reply(self, dialect: Dialect, session: AgentSession, request: Request, body: object) -> Response:
        """Answers a chat completion, or its equivalent in a dialect."""
        asked = replace(
            parse_request(dialect.to_chat(body)),
            key=request.headers.get("idempotency-key", ""),
            is_repeated=request.headers.get("x-stainless-retry-count", "0") != "0",
        )
        assert isinstance(body, dict), "parse_request has checked it"
        writer, answering = dialect.reply(MODEL, body), session.begin(asked)
        if asked.stream:
            events = _streamed(session, answering, writer)
            first = await anext(events)  # only a generator that has begun sees the client leave
            return http.EventStream(_chained(first, events), events, {})
        reply = await http.unless_client_leaves(request.receive, session.read(answering))
        _ = [*writer.begin(len(answering.prompt_ids)), *written_parts(writer, reply.parts), *writer.end(reply.end)]
        return JSONResponse(writer.whole())

    async def _count(self, dialect: Dialect, session: AgentSession, _request: Request, body: object) -> Response:
        asked = parse_request(dialect.to_chat(without_length(body)))
        return JSONResponse({"input_tokens": session.num_tokens(asked)})

    async def _models(self, _dialect: Dialect, _session: AgentSession, request: Request, _body: object) -> Response:
        name = request.path_params.get("id")  # every name is the policy's
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "asyncrl"}
        return JSONResponse({"object": "list", "data": [model]} if name is None else model)


def _named_in(body: object) -> str:
    """The key of a trajectory in the metadata of a request; empty if there is none."""
    told = body.get("metadata") if isinstance(body, dict) else None
    return str(told.get(KEY_HEADER) or "") if isinstance(told, dict) else ""


async def _streamed(session: AgentSession, answering: Answering, writer: Reply) -> AsyncGenerator[str, None]:
    """The frames of an answer as it is sampled, with a sign of life in each pause of `PING_S`."""
    reading = asyncio.create_task(session.read(answering))
    speech, num_calls, events = session.speech(answering), 0, writer.begin(len(answering.prompt_ids))
    heard: asyncio.Future[None] = asyncio.ensure_future(asyncio.sleep(0))  # who asks again may find tokens
    try:
        while True:
            for name, data in events:
                yield http.frame(data, name)
            done, _ = await asyncio.wait({reading, heard}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield ping_of(writer)
            heard = answering.heard  # before the tokens are read: what comes later ends the next wait
            parts = speech.hear(answering.token_ids)
            events = written_parts(writer, sent_parts(parts, answering.number, num_calls))
            num_calls += sum(isinstance(part, ToolCall) for part in parts)
            if reading.done():
                break
        last = sent_parts(speech.finish(), answering.number, num_calls)
        for name, data in [*events, *written_parts(writer, last), *writer.end(reading.result().end)]:
            yield http.frame(data, name)
        yield writer.done
    except Exception as error:  # noqa: BLE001 - task boundary: the status is sent already
        if not isinstance(error, ApiError):
            session.failure = error
            error = ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")
        name, data = writer.failed(error)
        yield http.frame(data, name)
    finally:
        await cancel(reading)


async def _chained(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    yield first
    async for event in events:
        yield event


async def _not_a_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = f"{request.method} {request.url.path}: {error.detail}; served are {', '.join(_DIALECTS)} and /v1/models"
    dialect = MESSAGES if request.url.path.startswith(MESSAGES.path) else CHAT
    return _refused(ApiError(error.status_code, found, code="not_found"), dialect)


def _refused(error: ApiError, dialect: Dialect) -> Response:
    response = http.error_response(error, dialect.error(error))
    response.headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients would ask again
    return response
