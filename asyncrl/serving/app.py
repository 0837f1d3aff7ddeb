"""The HTTP side of a fleet: OpenAI's routes as an ASGI application. A client's disconnect aborts its generation."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from asyncrl.chat import http
from asyncrl.chat.anthropic import COUNT_TOKENS, MESSAGES, without_length
from asyncrl.chat.connection_limits import SPARE_CONNECTIONS, ConnectionLimiter, ConnectionLimits, connections_that_fit
from asyncrl.chat.dialects import DIALECTS
from asyncrl.chat.fields import ApiError, bad_field, parsed
from asyncrl.chat.messages import for_template, signatures, wish, with_names, with_wish
from asyncrl.chat.reply import Dialect
from asyncrl.chat.server import Server
from asyncrl.data.call_splitter import CallFormat
from asyncrl.serving.answer import Event, Question, answer, whole_choices
from asyncrl.serving.bodies import Bodies, ChatBodies, CompletionBodies, DialectBodies
from asyncrl.serving.choice import Delta, Finished
from asyncrl.serving.discovery import replica_path
from asyncrl.serving.fleet import Fleet
from asyncrl.serving.metrics import ServingMetrics
from asyncrl.serving.model_text import ModelText
from asyncrl.serving.openapi import schema
from asyncrl.serving.protocol import ChatRequest, CompletionRequest, Options, forced_call

logger = logging.getLogger(__name__)

LAST_WORD_S = 5.0
"""Time for a client to read that its request timed out, before its connection is closed."""
MAX_CHOICES_IN_ALL = 4096
MAX_ID_CHARS = 256
"""Longest id of a session or request; longer ones are cut."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`name`: for clients. `started_at`: seconds since the epoch. `guided`: the engine supports guided decoding."""

    name: str
    text: ModelText
    started_at: float
    guided: bool = False


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(eq=False)
class Api:
    """Answers requests about one model.

    Args:
        api_key: None: no key required.
        request_timeout_s: longest time for one request, from its head to the last token.
        max_requests: requests in progress until their clients have received the answer; further ones are refused.
        local_only: refuses requests to a host name other than this machine's own.
        wait_timeout_s: longest time until the first token of an answer; then status 503.
    """

    model: ServedModel
    fleet: Fleet
    metrics: ServingMetrics
    _: KW_ONLY
    api_key: str | None
    request_timeout_s: float
    max_requests: int
    local_only: bool = False
    wait_timeout_s: float = math.inf
    turns: TurnTable = field(default_factory=lambda: TurnTable(), init=False)

    def server(self, grace_s: int) -> Server:
        limits = ConnectionLimits(
            max_connections=connections_that_fit(self.max_requests + SPARE_CONNECTIONS),
            response_timeout_s=self.request_timeout_s + LAST_WORD_S,
        )
        return Server(self.app(), ConnectionLimiter(limits, self.metrics.refusals), grace_s=grace_s)

    def app(self) -> FastAPI:
        # Routes of `one_replica` exist twice: for the whole fleet, and below the address of each replica.
        one_replica: tuple[tuple[str, str, Handler], ...] = (
            ("POST", "/v1/chat/completions", self._limited(self._chat)),
            ("POST", "/v1/completions", self._limited(self._completion)),
            *(("POST", path, self._limited(partial(self._in_dialect, d))) for path, d in DIALECTS.items()),
            ("POST", COUNT_TOKENS, self._limited(self._count)),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{id:path}", self._one_model),
            ("GET", "/health", self._health),
        )
        whole_fleet: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/openapi.json", self._schema),
            ("GET", "/metrics", self._metrics_page),
        )
        prefix = replica_path("{replica_id:int}")
        return FastAPI(
            openapi_url=None,
            routes=[
                *(self._route("", *route) for route in (*one_replica, *whole_fleet)),
                *(self._route(prefix, *route) for route in one_replica),
            ],
            exception_handlers={HTTPException: _not_a_route},
        )

    def _route(self, before: str, method: str, path: str, handler: Handler) -> Route:
        """`before`: path prefix, empty for the fleet."""
        return Route(before + path, _Endpoint(self._guarded(path, handler)), methods=[method])

    def _guarded(self, path: str, handler: Handler) -> Handler:
        """Turns every error of `handler` into an answer in OpenAI's error schema, and counts all answers. Each answer
        carries the id of its request."""

        async def run(request: Request) -> Response:
            now = asyncio.get_running_loop().time()
            request.state.deadline = now + self.request_timeout_s
            request.state.start_by = now + self.wait_timeout_s
            named = request_id_of(request.headers.get("x-request-id", "")[:MAX_ID_CHARS])
            request.state.id = named or secrets.token_hex(12)
            try:
                if self.local_only:
                    http.require_local_host(request)
                if path != "/health":  # probes of load balancers have no key
                    http.require_key(request, self.api_key)
                self._require_replica(request)
                response = await handler(request)
            except ApiError as e:
                response = _refused(path, e)
            except http.ClientLeft:
                self.metrics.disconnects += 1
                response = Response(status_code=http.STATUS_CLIENT_LEFT)
            except Exception as e:  # task boundary: the client gets an error answer
                logger.exception("a request to %s failed", path)
                response = _refused(path, ApiError(500, f"{type(e).__name__}: {e}", code="internal_error"))
            self.metrics.requests[path, response.status_code] += 1
            response.headers["x-request-id"] = request.state.id
            return response

        return run

    def _require_replica(self, request: Request) -> None:
        """Raises ApiError: the request's address names an unknown replica."""
        only, there = _only(request), {report.replica_id for report in self.fleet.reports}
        if only is not None and not there:
            raise ApiError(503, "the server does not know its replicas yet", code="not_serving")
        if only is not None and only not in there:
            raise ApiError(404, f"there is no replica {only}; ask {sorted(there)}", code="replica_not_found")

    def _limited(self, handler: Handler) -> Handler:
        """`handler`, limited to `max_requests` concurrent requests."""

        async def run(request: Request) -> Response:
            if self.metrics.in_flight >= self.max_requests:
                found = f"{self.max_requests} requests are in flight"
                raise ApiError(429, f"{found}; send this one later", code="too_many_requests")
            self.metrics.in_flight += 1
            request.state.until_sent.callback(self._leave)
            return await handler(request)

        return run

    def _leave(self) -> None:
        self.metrics.in_flight -= 1

    # -- routes --------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        question = await self._chat_question(request, await self._body(request))
        return await self._respond(request, question, ChatBodies(question, self.model.name, "chatcmpl"))

    async def _in_dialect(self, dialect: Dialect, request: Request) -> Response:
        body = await self._body(request)
        try:
            question = await self._chat_question(request, dialect.to_chat(body))
            if dialect is MESSAGES:  # its clients ask for more than most models have
                question = question.within(self.model.text.max_model_len)
            assert isinstance(body, dict), "to_chat has checked it"
            reply = dialect.reply(self.model.name, body)
            return await self._respond(request, question, DialectBodies(question, reply))
        except ApiError as e:
            raise dialect.renamed(e) from e

    async def _count(self, request: Request) -> Response:
        body = MESSAGES.to_chat(without_length(await self._body(request)))
        (prompt,) = (await self._chat_question(request, body)).prompts
        return JSONResponse({"input_tokens": len(prompt)})

    async def _chat_question(self, request: Request, body: object) -> Question:
        """The question of a chat completion's body. Raises ApiError."""
        asked = parsed(ChatRequest, body)
        assert isinstance(body, dict), "it was parsed"
        self._require_model(asked.model)
        tools = tuple(body["tools"]) if asked.calls_tools else ()
        messages = with_names([for_template(message) for message in asked.messages])
        # The engine guides the reply, if it can. What it cannot guide is asked for in the prompt.
        guided = self.model.guided and (asked.forced or not tools)
        schema = forced_call(asked, tools) if asked.forced else asked.guide
        guide = json.dumps(schema) if guided and schema is not None else None
        if not guided:
            messages = with_wish(
                messages, wish(asked.guide, body.get("tool_choice"), [t["function"]["name"] for t in tools])
            )
        prompt = await asyncio.to_thread(self.model.text.chat, messages, tools)
        calls = None
        if tools:
            is_guided = asked.forced and guided
            parser = "json" if is_guided else self.model.text.parser  # guided calls are bare JSON
            single = is_guided or not asked.parallel_tool_calls
            calls = await asyncio.to_thread(CallFormat, parser, signatures(tools), single)
        question = self._question(request, (prompt,), asked)
        start = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        thinking = (
            self.model.text.thinking(prompt, start) if guide is None else None
        )  # a guide begins at the first token
        return replace(question, calls=calls, json_schema=guide, thinking=thinking)

    async def _completion(self, request: Request) -> Response:
        asked = parsed(CompletionRequest, await self._body(request))
        self._require_model(asked.model)
        prompts = await asyncio.to_thread(lambda: [self.model.text.prompt(p) for p in asked.prompt])
        question = self._question(request, tuple(prompts), asked)
        return await self._respond(request, question, CompletionBodies(question, self.model.name, "cmpl"))

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_body()]})

    async def _one_model(self, request: Request) -> Response:
        self._require_model(request.path_params["id"])
        return JSONResponse(self._model_body())

    def _model_body(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": int(self.model.started_at),
            "owned_by": "asyncrl",
            "max_model_len": self.model.text.max_model_len,
        }

    async def _health(self, request: Request) -> Response:
        only = _only(request)
        states = [state for state in self.fleet.reports if only in (None, state.replica_id)]
        reason = self.fleet.not_serving(only)
        serving = sum(s.alive and s.version is not None for s in states)
        body: dict[str, Any] = {"serving": serving, "replicas": len(states)}
        if reason is not None:
            body |= ApiError(503, reason, code="not_serving").body()
        return JSONResponse(body, 200 if reason is None else 503)

    async def _schema(self, _request: Request) -> Response:
        keyed = self.api_key is not None
        return JSONResponse(schema(self.model.name, self.model.text.vocab_size, keyed=keyed))

    async def _metrics_page(self, _request: Request) -> Response:
        return PlainTextResponse(self.metrics.render(self.fleet), media_type="text/plain; version=0.0.4")

    async def _body(self, request: Request) -> object:
        return await http.read_json(request, timeout_s=min(http.BODY_TIMEOUT_S, self.request_timeout_s))

    # -- answers -------------------------------------------------------------------------------------------------

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self.model.name):
            message = f"model {name!r} is not served here; ask for {self.model.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _question(self, request: Request, prompts: tuple[np.ndarray, ...], options: Options) -> Question:
        question = Question(
            prompts,
            options,
            request.headers.get("x-session-id", "")[:MAX_ID_CHARS],
            request.state.id,
            near=self.turns.replica_of(request.state.id, time.monotonic()),
            only=_only(request),
        )
        if question.num_choices > MAX_CHOICES_IN_ALL:
            found = f"{len(prompts)} prompts with {options.n} choices each"
            raise bad_field("n", found, f"send at most {MAX_CHOICES_IN_ALL} choices in one request")
        return question

    async def _respond(self, request: Request, question: Question, bodies: Bodies | DialectBodies) -> Response:
        events = self._events(question, deadline=request.state.deadline, start_by=request.state.start_by)
        if question.options.stream:
            # The first event decides between an answer and an error, and has version and replica for the headers.
            try:
                first = await http.unless_client_leaves(request.receive, _next(events))
            except BaseException:
                await events.aclose()
                raise
            return http.EventStream(self._stream(bodies, first, events), events, _headers(first))

        async def collect() -> list[Event]:
            async with aclosing(events):
                return [event async for event in events]

        choices = whole_choices(await http.unless_client_leaves(request.receive, collect()))
        body = bodies.whole(choices)
        replicas = dict.fromkeys(r for c in choices for r in c.replica_ids)
        headers = {"x-replica-id": ",".join(map(str, replicas))}
        if body["weight_version"] is not None:
            headers["x-weight-version"] = str(body["weight_version"])
        return JSONResponse(body, headers=headers)

    async def _events(self, question: Question, *, deadline: float, start_by: float) -> AsyncGenerator[Event, None]:
        """The events of the answer. Updates the metrics, and remembers the replica that served the turn."""
        metrics, started = self.metrics, time.monotonic()
        model = self.model
        source = answer(question, self.fleet, model.text, deadline=deadline, start_by=start_by)
        waiting, replica_id = True, None
        metrics.waiting += 1
        try:
            async with aclosing(source):
                async for event in source:
                    if waiting:
                        waiting = False
                        metrics.waiting -= 1
                        metrics.first_token_s.observe(time.monotonic() - started)
                    if isinstance(event, Finished):
                        metrics.count_choice(len(question.prompts[event.index // question.options.n]), event)
                    else:
                        replica_id = event.replica_id
                    yield event
        finally:
            # If no token came, the request still counts as waiting.
            metrics.waiting -= waiting
            if replica_id is not None:
                self.turns.served(question.request_id, replica_id, time.monotonic())
            metrics.request_s.observe(time.monotonic() - started)

    async def _stream(
        self, bodies: Bodies | DialectBodies, first: Event, events: AsyncGenerator[Event, None]
    ) -> AsyncGenerator[str, None]:
        finished: list[Finished] = []
        event: Event | None = first
        try:
            async with aclosing(events):
                while event is not None:
                    if isinstance(event, Finished):
                        finished.append(event)
                    for made in bodies.frames(event):
                        yield made
                    event = await anext(events, None)
            for made in bodies.last(finished):
                yield made
        except ApiError as e:
            # The status is already sent, so the error is an event, which OpenAI's clients raise.
            yield bodies.failed(e)
        except (GeneratorExit, asyncio.CancelledError):
            self.metrics.disconnects += 1
            raise


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A handler as ASGI application. Closes the exit stack `until_sent` of its state once the response was taken."""

    handler: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        with ExitStack() as request.state.until_sent:
            response = await self.handler(request)
            await response(scope, receive, send)


def _only(request: Request) -> int | None:
    """The replica whose address was used; None for the fleet's address."""
    return request.path_params.get("replica_id")


async def _next(events: AsyncGenerator[Event, None]) -> Event:
    return await anext(events)


def _refused(path: str, error: ApiError) -> Response:
    """The error in the form of the requested API."""
    dialect = MESSAGES if path == COUNT_TOKENS else DIALECTS.get(path)
    return http.error_response(error, None if dialect is None else dialect.error(error))


def _headers(first: Event) -> dict[str, str]:
    if not isinstance(first, Delta):
        return {}
    return {"x-replica-id": str(first.replica_id), "x-weight-version": str(first.version)}


async def _not_a_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; see GET /v1/models and POST /v1/chat/completions"
    response = http.error_response(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})  # such as the allowed methods
    return response


# The table behind the header `x-request-id`: which replica served a turn. Pure: the caller passes the time.


MAX_TURNS = 100_000
EXPIRY_S = 3600.0


def request_id_of(named: str) -> str:
    """The request's id, from a name that is this id or the id of the answer's body (some clients only have the
    body)."""
    return re.sub("^(chatcmpl|cmpl)-", "", named.strip())


class TurnTable:
    """The replica of each recent turn by request id. Drops the oldest entries, and entries not named for `expiry_s`
    seconds.

    A conversation stays on its replica if each turn names the previous one, or if all its turns have one id.
    """

    def __init__(self, *, max_turns: int = MAX_TURNS, expiry_s: float = EXPIRY_S) -> None:
        self._replicas: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._max_turns = max_turns
        self._expiry_s = expiry_s

    def __len__(self) -> int:
        return len(self._replicas)

    def served(self, request_id: str, replica_id: int, now_s: float) -> None:
        """Records the replica of this turn."""
        self._replicas[request_id] = replica_id, now_s
        self._replicas.move_to_end(request_id)
        while len(self._replicas) > self._max_turns or self._is_old(next(iter(self._replicas)), now_s):
            self._replicas.popitem(last=False)

    def replica_of(self, request_id: str, now_s: float) -> int | None:
        """The replica of this turn; None if the id is unknown or expired."""
        if request_id not in self._replicas or self._is_old(request_id, now_s):
            return None
        return self._replicas[request_id][0]

    def _is_old(self, request_id: str, now_s: float) -> bool:
        return now_s - self._replicas[request_id][1] > self._expiry_s
