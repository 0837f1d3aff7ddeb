"""`vllm serve` as somebody would start it for `rollout.engine=remote`, on a CPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from asyncrl.inference.remote.server_facts import EXTENSION

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
    "--no-enable-chunked-prefill", "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(64 << 20),
)  # fmt: skip
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the sampler compiles otherwise: 20 s for the first request
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in EngineCore: one process less
}


class VllmServer:
    """One server and all of its processes. It may be started again after it was killed, at the same address."""

    def __init__(self, model: Path, log: Path, *flags: str, extension: bool = True) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        more = ("--worker-extension-cls", EXTENSION) if extension else ()
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        # The same server as `vllm serve`: the command itself looks for a package vllm, and a CPU has vllm-cpu.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self._command = [*command, *address, *FLAGS, *more, *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> VllmServer:
        self.spawn()
        self.wait()
        return self

    def spawn(self) -> None:
        """Starts it, and does not wait."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def wait(self, timeout_s: float = START_S) -> None:
        """Returns when it serves; fails when it ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            assert self._process is not None
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.2)

    def kill(self) -> None:
        """All of its processes, in the middle of whatever they do."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")[-8000:]
