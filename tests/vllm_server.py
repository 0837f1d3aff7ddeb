"""`vllm serve` as somebody would start it for `rollout.engine=remote`, on a CPU."""

import os
import sys
from pathlib import Path

from asyncrl.inference.remote.vllm_facts import EXTENSION
from tests.processes import ROOT
from tests.server_process import ServerProcess

FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
    "--no-enable-chunked-prefill", "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(64 << 20),
)  # fmt: skip
NATIVE = ("--weight-transfer-config", '{"backend": "nccl"}')
"""Flags of a server that takes publishes by vLLM's own endpoints."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the sampler compiles otherwise: 20 s for the first request
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in EngineCore: one process less
}


class VllmServer(ServerProcess):
    def __init__(self, model: Path, log: Path, *flags: str, extension: bool = True) -> None:
        more = ("--worker-extension-cls", EXTENSION) if extension else ()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        # The same server as `vllm serve`: the command itself looks for a package vllm, and a CPU has vllm-cpu.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        super().__init__([*command, *FLAGS, *more, *flags], log, ENVIRONMENT | {"PYTHONPATH": path})
