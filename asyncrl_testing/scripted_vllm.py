"""A vLLM server without a model: the routes that `rollout.engine=remote` uses, around a `FakeEngine`, behind a real
socket. Their answers have the form of vLLM 0.32's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from asyncrl.errors import AsyncRLError, GenerationError
from asyncrl.inference.remote.orders import read_order
from asyncrl.inference.remote.vllm_facts import ServerFacts
from asyncrl.types import GenerationRequest, Manifest, SamplingParams, TokenChunk
from asyncrl_testing.scripted_server import Route, ScriptedServer

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


class ScriptedVllm(ScriptedServer):
    """`vllm serve`.

    Args:
        facts: of the workers and of /server_info; None: the workers have no `ServeExtension`.
        others: of `ScriptedServer`; the key guards /v1 and /inference.
    """

    label_path = "/weight_info"
    samples_path = "/inference/v1/generate"

    def __init__(self, *, facts: ServerFacts | None = FACTS, **others: Any) -> None:
        super().__init__(**others)
        self.published: list[Manifest] = []
        self._facts = facts

    def _guards(self, path: str) -> bool:
        return path.startswith(("/v1", "/inference"))

    def _routes(self) -> Sequence[Route]:
        return (
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
        )

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
            "parallel_config": {
                "world_size": facts.world_size,
                "data_parallel_size": facts.data_parallel,
                "pipeline_parallel_size": facts.pipeline_parallel,
            },
            "device_config": {"device": facts.device},
            "scheduler_config": {"enable_chunked_prefill": facts.chunked_prefill},
            "weight_transfer_config": facts.transfer and {"backend": facts.transfer},
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
        await self._relabel((await request.json())["new_version"])
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
