"""Records what a real SGLang answers, for the tests that run where SGLang is not installed.

`make record-sglang` writes tests/data/sglang_responses.json: for each request what was asked, and every response of
SGLang's TokenizerManager as `asyncrl.inference.sglang.host` reads it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import SglangEngineConfig
from asyncrl.inference.sglang.host import Host
from asyncrl.inference.sglang.host_process import engine_arguments
from asyncrl.inference.sglang.sampling_params import asked
from asyncrl_testing.engine_client import make_request
from asyncrl_testing.random_model import write_random_qwen3

TARGET = Path(__file__).resolve().parents[1] / "tests/data/sglang_responses.json"
KEPT = ("id", "finish_reason", "completion_tokens", "cached_tokens", "weight_version", "weight_versions")


class Recorder:
    """SGLang's TokenizerManager, with a copy of each response."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.responses: dict[str, list[dict[str, Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, request: Any, http: Any) -> AsyncIterator[dict[str, Any]]:
        async for out in self._manager.generate_request(request, http):
            meta = {key: out["meta_info"][key] for key in KEPT if key in out["meta_info"]}
            logprobs = [[entry[0], entry[1], None] for entry in out["meta_info"].get("output_token_logprobs") or ()]
            kept = {"output_ids": list(out["output_ids"]), "meta_info": meta | {"output_token_logprobs": logprobs}}
            self.responses.setdefault(request.rid, []).append(copy.deepcopy(kept))
            yield out


async def record(engine: Any) -> dict[str, Any]:
    answered: dict[str, list[Any]] = {}
    ended: dict[str, asyncio.Event] = {}

    def send(message: Any) -> None:
        for output in message[1]:
            answered.setdefault(output.rid, []).append(output)
            if output.reason is not None:
                ended.setdefault(output.rid, asyncio.Event()).set()

    host = Host(engine, send)
    recorder = host._manager = Recorder(engine.tokenizer_manager)

    async def begin(rid: str, **settings: Any) -> None:
        request = make_request(**settings)
        await host.submit(asked(request, rid=rid, extra_key="0", vocab_size=128, eos=()))

    async def some(rid: str) -> None:
        while not answered.get(rid):  # noqa: ASYNC110 - a script polls
            await asyncio.sleep(0.001)

    await host.announce("3")
    await begin("whole", max_tokens=24)
    await begin("filtered", max_tokens=8, temperature=1.0, top_k=3, min_tokens=4, stop=(5, 6))
    await ended.setdefault("whole", asyncio.Event()).wait()
    await begin("greedy", max_tokens=24, temperature=0.0)
    await ended.setdefault("greedy", asyncio.Event()).wait()
    greedy = [int(i) for output in answered["greedy"] for i in output.ids]
    await begin("stopped", max_tokens=24, temperature=0.0, stop=(greedy[9],))
    await begin("aborted", max_tokens=400)
    await some("aborted")
    await host.abort(["aborted"])
    for i in range(40):
        await begin(f"queued-{i}", max_tokens=64, seed=i)
    await some("queued-0")
    await host.abort([f"queued-{i}" for i in range(40)])
    for rid in ("filtered", "stopped", "aborted"):
        await ended.setdefault(rid, asyncio.Event()).wait()
    await begin("kept", max_tokens=60)
    await some("kept")
    await host.freeze("in_place")
    await host.announce("4")
    await host.unfreeze()
    await ended.setdefault("kept", asyncio.Event()).wait()
    wanted = ["whole", "filtered", "greedy", "stopped", "aborted", "kept", "queued-0", "queued-39"]
    return {rid: recorder.responses.get(rid, []) for rid in wanted}


def main() -> int:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from sglang.srt.entrypoints.engine import Engine

    with tempfile.TemporaryDirectory() as directory:
        path = write_random_qwen3(Path(directory))
        settings = SglangEngineConfig(
            max_model_len=512, max_running_requests=8, stream_interval=4, max_total_tokens=1 << 14
        )
        arguments = engine_arguments(ModelConfig(path=str(path)), settings, load_real_weights=True, seed=0, on_cpu=True)
        engine = Engine(**arguments)
        try:
            responses = asyncio.run(record(engine))
        finally:
            engine.shutdown()
    TARGET.write_text(json.dumps({"sglang": metadata.version("sglang"), "responses": responses}) + "\n")
    print(f"{TARGET}: {', '.join(f'{rid} {len(out)}' for rid, out in responses.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
