"""vLLM and SGLang as `replica.py` measures them: started with the adapter's own arguments, their outputs counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import psutil

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig, SglangEngineConfig, VllmEngineConfig
from asyncrl.types import GenerationRequest

START_S = 240.0
STOP_S = 30.0


def model_config(path: Path) -> ModelConfig:
    return ModelConfig(path=str(path), inference_dtype="float32")


class BareEngine(Protocol):
    name: str
    """In `rollout.engine`."""
    title: str
    results: str
    """File in benchmarks/results."""
    processes: str
    """Whose CPU time is counted: below the owner, of the owner, of the client."""
    rollout: RolloutConfig
    block_tokens: int
    """Of the cache of prompts; known after `start`."""
    inner: Any
    """The package's own engine."""

    def start(self, path: Path) -> None: ...

    async def generate(self, request: GenerationRequest, vocab_size: int) -> int:
        """Returns how many tokens came."""
        ...

    def conditions(self, inner: Any) -> dict[str, object]:
        """What could put one engine ahead of another. Asked for in the process that owns it."""
        ...

    def conditions_of_adapter(self, adapter: Any) -> dict[str, object]: ...

    def stop(self) -> None: ...


def of_processes(processes: list[psutil.Process]) -> dict[str, object]:
    return {
        "niceness": [os.nice(0), *sorted(process.nice() for process in processes)],
        "variables": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "LD_PRELOAD")},
    }


class BareVllm:
    name, title, results = "vllm", "vLLM", "replica.md"
    processes = "EngineCore, the process that holds AsyncLLM, the client"

    def __init__(self) -> None:
        settings = VllmEngineConfig(
            max_model_len=4096,
            max_num_seqs=256,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=True,
        )
        self.rollout = RolloutConfig(engine="vllm", vllm=settings)
        self.block_tokens = 0
        self.inner: Any = None

    def start(self, path: Path) -> None:
        from asyncrl.inference.vllm.launch import Launcher

        self._launcher = Launcher(model_config(path), self.rollout.vllm, load_real_weights=True)
        self._launcher.start()
        self.inner = self._launcher.started.result(START_S)
        self.block_tokens = self.inner.vllm_config.cache_config.block_size

    async def generate(self, request: GenerationRequest, vocab_size: int) -> int:
        from vllm.inputs import tokens_input

        from asyncrl.inference.vllm.sampling_params import sampling_params

        params, count = sampling_params(request, vocab_size), 0
        async for output in self.inner.generate(tokens_input(request.prompt_ids.tolist()), params, request.request_id):
            count += len(output.outputs[0].token_ids)
        return count

    def conditions(self, inner: Any) -> dict[str, object]:
        cores = inner.engine_core.resources.engine_manager.processes  # the title of EngineCore hides how it started
        found = of_processes([psutil.Process(core.pid) for core in cores])
        return found | {"start": [type(core).__name__ for core in cores]}

    def conditions_of_adapter(self, adapter: Any) -> dict[str, object]:
        return self.conditions(adapter._llm)

    def stop(self) -> None:
        self._launcher.stop(STOP_S)


class BareSglang:
    name, title, results = "sglang", "SGLang", "replica_sglang.md"
    processes = "the scheduler, and the host process of a replica; the process that holds the Engine; the client"
    block_tokens = 1

    def __init__(self) -> None:
        settings = SglangEngineConfig(max_model_len=4096, max_running_requests=256, max_total_tokens=1 << 16)
        self.rollout = RolloutConfig(engine="sglang", sglang=settings)
        self.inner: Any = None

    def start(self, path: Path) -> None:
        from asyncrl.inference.sglang.host_process import VARIABLES, engine_arguments, runs_on_cpu

        on_cpu = runs_on_cpu()
        os.environ.update(VARIABLES)
        if on_cpu:
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        arguments = engine_arguments(model_config(path), self.rollout.sglang, load_real_weights=True, on_cpu=on_cpu)
        from sglang.srt.entrypoints.engine import Engine

        self.inner = Engine(**arguments)

    async def generate(self, request: GenerationRequest, vocab_size: int) -> int:
        from sglang.srt.managers.io_struct import GenerateReqInput

        from asyncrl.inference.sglang.sampling_params import asked

        params = asked(request, rid=request.request_id, extra_key="0", vocab_size=vocab_size, eos=())
        asks = GenerateReqInput(
            rid=params.rid,
            input_ids=params.input_ids,
            sampling_params=params.sampling_params,
            return_logprob=True,
            stream=True,
        )
        count = 0
        async for output in self.inner.tokenizer_manager.generate_request(asks, None):
            count = output["meta_info"]["completion_tokens"]
        return count

    def conditions(self, inner: Any) -> dict[str, object]:
        """The host process of a replica counts as the owner: both hold the Engine."""
        del inner
        below = psutil.Process().children(recursive=True)
        return of_processes([process for process in below if "scheduler" in process.name()])

    def conditions_of_adapter(self, adapter: Any) -> dict[str, object]:
        return self.conditions(adapter)

    def stop(self) -> None:
        self.inner.shutdown()


BARE_ENGINES: dict[str, type[BareEngine]] = {"vllm": BareVllm, "sglang": BareSglang}
