"""A server of SGLang without a model: the routes that `rollout.engine=remote` uses, around a `FakeEngine`, behind a
real socket. Their answers have the form of SGLang 0.5.23's."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from asyncrl.errors import AsyncRLError, GenerationError
from asyncrl.inference.remote.sglang_dialect import HOT
from asyncrl.types import GenerationRequest, Manifest, SamplingParams, TokenChunk
from asyncrl_testing.scripted_server import Route, ScriptedServer

INFO = {
    "version": "0.5.23",
    "max_req_input_len": 4096,
    "tp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "tokenizer_worker_num": 1,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "disable_overlap_schedule": True,
    "incremental_streaming_output": True,
    "enable_custom_logit_processor": True,
}
"""What it says of itself, unless a test says otherwise."""


class ScriptedSglang(ScriptedServer):
    """`sglang.launch_server`. As there, a request whose connection was closed goes on, a pause with mode abort never
    returns where requests are frozen, and a paused server has no health.

    Args:
        info: differences to `INFO`.
        vocab_size: tokens that it seems to sample from.
        raw: its log-probabilities are of temperature 1.
        preferred: the sampling parameters that it was started with.
        others: of `ScriptedServer`; the key guards everything but the health.
    """

    label_path = "/server_info"
    samples_path = "/generate"

    def __init__(
        self,
        *,
        info: dict[str, Any] | None = None,
        architecture: str = "Qwen3ForCausalLM",
        vocab_size: int = 10**9,
        raw: bool = False,
        preferred: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self._preferred = preferred
        self.directories: list[str] = []
        """Of the publishes that it has loaded."""
        self.asked: list[dict[str, Any]] = []
        """Bodies of the requests of a replica."""
        self._info = INFO | (info or {})
        self._architecture, self._vocab_size, self._raw = architecture, vocab_size, raw
        self.flat = False
        """Every token is as likely as any other, at all temperatures."""
        self._paused = False
        self._generating: set[asyncio.Task[None]] = set()

    def _guards(self, path: str) -> bool:
        return path != "/health"

    def _looks_at(self) -> Sequence[str]:
        return (*super()._looks_at(), "/model_info")

    def _routes(self) -> Sequence[Route]:
        return (
            ("GET", "/health", self._health),
            ("GET", "/model_info", self._model_info),
            ("GET", "/server_info", self._server_info),
            ("POST", "/generate", self._generate),
            ("POST", "/abort_request", self._abort),
            ("POST", "/pause_generation", self._pause),
            ("POST", "/continue_generation", self._continue),
            ("POST", "/update_weight_version", self._update_weight_version),
            ("POST", "/update_weights_from_disk", self._update_weights_from_disk),
        )

    async def _health(self) -> Response:
        return Response(status_code=200 if self.engine.health().alive and not self._paused else 503)

    async def _model_info(self) -> Response:
        if not self.engine.health().alive:
            return Response(status_code=503)
        told = {"model_path": "m", "weight_version": self.label, "architectures": [self._architecture]}
        told["preferred_sampling_params"] = self._preferred
        return JSONResponse(told)

    async def _server_info(self) -> Response:
        async with self.busy:
            return JSONResponse(self._info)

    async def _pause(self, request: Request) -> Response:
        mode = (await request.json())["mode"]
        if mode == "abort" and self._paused and self.engine.health().running:
            await asyncio.sleep(3600)  # it aborts again and again, and frozen requests never end
        self._paused = True
        await self.engine.pause("abort" if mode == "abort" else "keep")
        return JSONResponse({"status": "ok"})

    async def _continue(self) -> Response:
        self._paused = False
        await self.engine.resume()
        return JSONResponse({"status": "ok"})

    async def _update_weight_version(self, request: Request) -> Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            await self.engine.abort(None)
        await self._relabel(body["new_version"])
        return JSONResponse({"success": True})

    async def _update_weights_from_disk(self, request: Request) -> Response:
        body = await request.json()
        assert self._paused, "weights are changed under requests"
        assert not body["flush_cache"], "which SGLang refuses where requests are frozen"
        manifest = Manifest(publish_id=len(self.directories), version=None, tensors=(), buckets=())
        try:
            async with self.busy:
                await self.engine.load_weights(manifest, None, 60.0)  # type: ignore[arg-type]
        except AsyncRLError as error:
            return JSONResponse({"success": False, "message": str(error)}, 400)
        self.directories.append(body["model_path"])
        return JSONResponse({"success": True, "message": "", "num_paused_requests": 0})

    async def _abort(self, request: Request) -> Response:
        prefix = (await request.json())["rid"]
        known = [*self.engine._running, *(s.request.request_id for s in self.engine._waiting)]
        await self.engine.abort([rid for rid in known if rid.startswith(prefix)])
        return Response()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        asked = body["sampling_params"]
        if not body.get("stream"):
            return JSONResponse(self._proof(asked))
        self.asked.append(body)
        sampling = SamplingParams(
            temperature=asked["temperature"],
            max_tokens=asked["max_new_tokens"],
            stop_token_ids=tuple(asked.get("stop_token_ids", ())),
        )
        prompt = np.array(body["input_ids"], np.int32)
        length = len(prompt) + sampling.max_tokens
        if length > self.engine.script.max_model_len:
            error = {"message": f"{length} tokens is longer than the model's context length", "code": 400}
            return StreamingResponse(iter([f"data: {json.dumps({'error': error})}\n\n"]))
        lines: asyncio.Queue[str] = asyncio.Queue()
        # A task of its own: as in SGLang, generation goes on after the client disconnects.
        work = asyncio.create_task(self._work(GenerationRequest(body["rid"], prompt, sampling, seed=0), lines))
        self._generating.add(work)
        work.add_done_callback(self._generating.discard)
        return StreamingResponse(_until_done(lines), media_type="text/event-stream")

    def _proof(self, asked: dict[str, Any]) -> dict[str, Any]:
        hot = asked["temperature"] == HOT
        values = [-math.log(self._vocab_size) if hot else 0.0 for _ in range(asked["max_new_tokens"])]
        if self.flat:
            values = [-math.log(self._vocab_size)] * len(values)
        elif self._raw:
            values = [-1.0 - i for i in range(asked["max_new_tokens"])]
        return {"meta_info": {"output_token_logprobs": [[value, 0, None] for value in values]}}

    async def _work(self, request: GenerationRequest, lines: asyncio.Queue[str]) -> None:
        ids: list[int] = []
        logprobs: list[list[Any]] = []
        spans: list[dict[str, Any]] = []
        try:
            async for chunk in self.engine.generate(request):
                first = len(ids)
                ids += chunk.token_ids.tolist()
                logprobs += [[p, i, None] for i, p in zip(ids[first:], chunk.logprobs.tolist(), strict=True)]
                if len(ids) > first:
                    label = self._labels[chunk.version]
                    if not spans or spans[-1]["version"] != label:
                        spans.append({"version": label, "start": first, "end": first})
                    spans[-1]["end"] = len(ids)
                since = first if self._info["incremental_streaming_output"] else 0
                lines.put_nowait(_line(self.label, chunk, ids, logprobs, spans, since))
        except GenerationError as error:
            lines.put_nowait(json.dumps({"error": {"message": str(error), "code": 500}}))
        lines.put_nowait("[DONE]")


async def _until_done(lines: asyncio.Queue[str]) -> AsyncIterator[str]:
    line = ""
    while line != "[DONE]":
        line = await lines.get()
        yield f"data: {line}\n\n"


def _line(
    label: str, chunk: TokenChunk, ids: list[int], logprobs: list[list[Any]], spans: list[dict[str, Any]], since: int
) -> str:
    reason = None if chunk.finish_reason is None else {"type": chunk.finish_reason}
    meta: dict[str, Any] = {
        "finish_reason": reason,
        "weight_version": label,
        "completion_tokens": len(ids),
        "output_token_logprobs": logprobs[since:],
    }
    if reason is not None and spans:
        meta["weight_versions"] = spans
    return json.dumps({"output_ids": ids[since:], "meta_info": meta})
