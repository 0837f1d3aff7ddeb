"""A vLLM server without a model: the routes that `rollout.engine=remote` uses, around a `FakeEngine`, behind a real
socket. Their answers have the form of vLLM 0.32's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from asyncrl.errors import AsyncRLError, GenerationError
from asyncrl.inference.remote.orders import read_order
from asyncrl.inference.remote.server_facts import ServerFacts
from asyncrl.types import GenerationRequest, Manifest, SamplingParams, TokenChunk
from asyncrl_testing.fake_engine import FakeEngine, FakeScript

FACTS = ServerFacts(
    architecture="Qwen3ForCausalLM",
    vocab_size=10**9,
    max_model_len=4096,
    world_size=1,
    logprobs_mode="processed_logprobs",
    device="cuda",
    chunked_prefill=True,
    tied=True,
    dummy=False,
)
"""What it says of itself, unless a test says otherwise."""


class ScriptedServer:
    """One server: `start`, then `stop` or, as a lost process, `kill`; another one may then take its port.

    Args:
        facts: of the workers and of /server_info; None: the workers have no `ServeExtension`.
        key: that requests of /v1 and /inference need.
        lacks: paths of routes that it does not have.
    """

    def __init__(
        self,
        *,
        script: FakeScript | None = None,
        facts: ServerFacts | None = FACTS,
        key: str | None = None,
        lacks: tuple[str, ...] = (),
        port: int = 0,
    ) -> None:
        self.engine = FakeEngine(script or FakeScript(tick_s=0.001))
        self.label = "default"
        self.published: list[Manifest] = []
        self.calls: list[str] = []
        """Paths, in the order of their requests; without the looks for the server's health."""
        self.looks = 0
        """Requests of /weight_info."""
        self.fail_next: str | None = None
        """Path of a route whose next call answers 500."""
        self._facts, self._key, self._lacks, self._port = facts, key, lacks, port
        self._labels = ["default"]
        self.busy = asyncio.Lock()
        """Held while weights are loaded: vLLM's engine answers nothing else then."""
        self._serving: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    async def start(self) -> ScriptedServer:
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
        """Samples with weights that nobody here has published, although /weight_info says otherwise."""
        self._labels.append("default")
        await self.engine.commit(len(self._labels) - 1)

    # -- routes --------------------------------------------------------------------------------------------------

    def _app(self) -> Any:
        app = FastAPI()

        for method, path, route in (
            ("GET", "/health", self._health),
            ("GET", "/version", self._version),
            ("GET", "/v1/models", self._models),
            ("GET", "/weight_info", self._weight_info),
            ("GET", "/server_info", self._server_info),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("POST", "/update_weight_version", self._update_weight_version),
            ("POST", "/collective_rpc", self._collective_rpc),
            ("POST", "/inference/v1/generate", self._generate),
            ("POST", "/inference/v1/abort_requests", self._abort),
        ):
            app.add_api_route(path, route, methods=[method])

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
            await (refusal or app)(scope, receive, send)

        return guarded

    def _refusal(self, request: Request) -> Response | None:
        path = request.url.path
        self.looks += path == "/weight_info"
        if path not in ("/health", "/weight_info"):
            self.calls.append(path)
        if path in self._lacks:
            return JSONResponse({"detail": "Not Found"}, 404)
        guards = self._key is not None and path.startswith(("/v1", "/inference"))
        if guards and request.headers.get("authorization") != f"Bearer {self._key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if self.fail_next == path:
            self.fail_next = None
            return JSONResponse({"error": {"message": "scripted failure"}}, 500)
        return None

    async def _health(self) -> Response:
        return Response(status_code=200 if self.engine.health().alive else 503)

    async def _version(self) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]})

    async def _weight_info(self) -> Response:
        async with self.busy:
            return JSONResponse({"weight_version": self.label})

    async def _server_info(self) -> Response:
        facts = self._facts or FACTS
        config = {
            "model_config": {
                "max_model_len": facts.max_model_len,
                "logprobs_mode": facts.logprobs_mode,
            },
            "parallel_config": {"world_size": facts.world_size, "data_parallel_size": 1},
            "device_config": {"device": facts.device},
            "scheduler_config": {"enable_chunked_prefill": facts.chunked_prefill},
            "load_config": {"load_format": "dummy" if facts.dummy else "auto"},
        }
        return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def _pause(self, mode: str = "abort", clear_cache: bool = True) -> Response:
        await self.engine.pause("drain" if mode == "wait" else mode)  # type: ignore[arg-type]
        return JSONResponse({"status": "paused"})

    async def _resume(self) -> Response:
        await self.engine.resume()
        return JSONResponse({"status": "resumed"})

    async def _update_weight_version(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        self._labels.append(self.label)
        await self.engine.commit(len(self._labels) - 1)
        return JSONResponse({"success": True, "new_version": self.label})

    async def _collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        if body["method"] == "asyncrl_describe" and self._facts is not None:
            return JSONResponse({"results": [asdict(self._facts)]})
        if body["method"] == "asyncrl_publish" and self._facts is not None:
            return await self._publish(body["args"][0])
        return JSONResponse({"error": {"message": f"Method {body['method']!r} is not implemented."}}, 500)

    async def _publish(self, order: str) -> Response:
        manifest, source, timeout_s = read_order(order)
        try:
            async with self.busy:
                digest = await self.engine.load_weights(manifest, source, timeout_s)
        except AsyncRLError as error:
            return JSONResponse({"results": [[type(error).__name__, str(error), None]]})
        self.published.append(manifest)
        return JSONResponse({"results": [["", "", None if digest is None else list(digest)]]})

    async def _abort(self, request: Request) -> Response:
        names = (await request.json())["request_ids"]
        await self.engine.abort([name.removeprefix("generate-tokens-") for name in names])
        return Response()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if "token_ids" not in body:
            return JSONResponse({"error": {"message": "Field required", "code": 400}}, 400)
        asked = body["sampling_params"]
        if len(body["token_ids"]) + asked["max_tokens"] > self.engine.script.max_model_len:
            return JSONResponse({"error": {"message": "beyond the maximum context length", "code": 400}}, 400)
        sampling = SamplingParams(
            temperature=asked["temperature"],
            max_tokens=asked["max_tokens"],
            min_tokens=asked["min_tokens"],
            stop_token_ids=tuple(asked["stop_token_ids"]),
        )
        prompt = np.array(body["token_ids"], np.int32)
        return StreamingResponse(
            self._lines(GenerationRequest(body["request_id"], prompt, sampling, seed=asked["seed"])),
            media_type="text/event-stream",
        )

    async def _lines(self, request: GenerationRequest) -> AsyncIterator[str]:
        spans: list[dict[str, Any]] = []
        count = 0
        try:
            async for chunk in self.engine.generate(request):
                if len(chunk.token_ids):
                    label = self._labels[chunk.version]
                    if not spans or spans[-1]["version"] != label:
                        spans.append({"version": label, "start": count, "end": count})
                    count += len(chunk.token_ids)
                    spans[-1]["end"] = count
                yield f"data: {json.dumps(_choice(request, chunk, spans))}\n\n"
        except GenerationError as error:
            yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
        yield "data: [DONE]\n\n"


def _choice(request: GenerationRequest, chunk: TokenChunk, spans: list[dict[str, Any]]) -> dict[str, Any]:
    ids, is_last = chunk.token_ids.tolist(), chunk.finish_reason is not None
    content = [
        {"token_id": i, "logprob": p, "rank": 1, "top_logprobs": []}
        for i, p in zip(ids, chunk.logprobs.tolist(), strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": chunk.finish_reason,
        "token_ids": ids,
        "logprobs": {"content": content},
        "weight_versions": spans if is_last and spans else None,
    }
    return {"request_id": f"generate-tokens-{request.request_id}", "output_mode": "tokens", "choices": [choice]}


def facts_with(**changes: Any) -> ServerFacts:
    """`FACTS` with these fields."""
    return replace(FACTS, **changes)
