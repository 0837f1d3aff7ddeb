"""The HTTP side of agents: one server at the recipe's address, one key per trajectory. The time limit of a trajectory
also limits its requests."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from asyncrl.chat import http
from asyncrl.chat.connection_limits import ConnectionLimiter, ConnectionLimits
from asyncrl.chat.dialects import DIALECTS
from asyncrl.chat.fields import ApiError
from asyncrl.chat.reply import Dialect
from asyncrl.chat.server import Server, address_of, bind, is_local
from asyncrl.config.environments import AgentConfig
from asyncrl.environments.agent_requests import in_dialect, parse_request, streamed, whole
from asyncrl.environments.agent_session import AgentSession
from asyncrl.remote.tasks import end

logger = logging.getLogger(__name__)

MODEL = "policy"
KEY_HEADER = "x-trajectory-key"
"""Carries the trajectory's key, for clients whose own key is the same for all trajectories. Takes precedence."""
_STOP_S = 3.0


class AgentServer:
    """`url`: the base URL for OpenAI clients, as agents reach it.

    Args:
        config: the address to listen on, and the address that agents are given.
        limits: of its connections.
    """

    def __init__(self, config: AgentConfig, limits: ConnectionLimits) -> None:
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
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.add_route("/v1/chat/completions", partial(self._reply, None), methods=["POST"])
        for path, dialect in DIALECTS.items():
            app.add_route(path, partial(self._reply, dialect), methods=["POST"])
        app.add_route("/v1/models", self._models, methods=["GET"])
        return app

    async def _reply(self, dialect: Dialect | None, request: Request) -> Response:
        """Answers a chat completion, or its equivalent in a dialect."""
        session: AgentSession | None = None
        try:
            session = self._session(request)
            body = await http.read_json(request)
            asked = parse_request(body if dialect is None else dialect.to_chat(body))
            asked = replace(asked, is_repeated=request.headers.get("x-stainless-retry-count", "0") != "0")
            reply = await http.unless_client_leaves(request.receive, session.answer(asked))
            assert isinstance(body, dict), "parse_request has checked it"
            answer, frames = whole(reply, MODEL), streamed(reply, MODEL, include_usage=asked.include_usage)
            if dialect is not None:
                answer, frames = in_dialect(reply, dialect.reply(MODEL, body))
            events = _events(frames)
            return http.EventStream(events, events, {}) if asked.stream else JSONResponse(answer)
        except ApiError as error:
            return _refused(error, dialect)
        except http.ClientLeft:
            return Response(status_code=http.STATUS_CLIENT_LEFT)
        except Exception as error:  # task boundary: the agent gets an error answer, and its trajectory fails
            logger.exception("a request of an agent failed")
            if session is not None:
                session.failure = error
            return _refused(ApiError(500, f"{type(error).__name__}: {error}", code="internal_error"), dialect)

    async def _models(self, request: Request) -> Response:
        try:
            self._session(request)
        except ApiError as error:
            return _refused(error)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "asyncrl"}
        return JSONResponse({"object": "list", "data": [model]})

    def _session(self, request: Request) -> AgentSession:
        if self._for_this_machine:
            http.require_local_host(request)
        key = request.headers.get(KEY_HEADER) or http.key_of(request)
        found = self._sessions.get(key)  # keys are random and live as long as their trajectory
        if found is None:
            raise ApiError(401, "the API key belongs to no trajectory that is running", code="invalid_api_key")
        return found


async def _events(frames: Iterable[str]) -> AsyncGenerator[str, None]:
    for made in frames:
        yield made


def _refused(error: ApiError, dialect: Dialect | None = None) -> Response:
    named = error if dialect is None else dialect.renamed(error)
    response = http.error_response(named, None if dialect is None else dialect.error(named))
    response.headers["x-should-retry"] = "false"  # OpenAI's clients would retry, and each request counts as a turn
    return response
