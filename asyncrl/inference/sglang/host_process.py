"""Starts SGLang's process and calls it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path
from asyncrl.config.rollout import SglangEngineConfig
from asyncrl.errors import ConfigError, GenerationError, explain
from asyncrl.inference.sglang.weight_channel import LOADER
from asyncrl.inference.shared.stamped_stream import Output
from asyncrl.workers.messages import LENGTH, packed

logger = logging.getLogger(__name__)

_CPU_KV_TOKENS = 1 << 16
SPARE_TOKENS = 6
"""SGLang refuses prompts within six tokens of its context length, and ends responses two tokens before it."""
_WATCHDOG_S = 86_400.0
"""SGLang kills itself after this long without a step. A pause with requests in flight counts, and may last until the
next publish."""
_ENDED = "SGLang's process ended"
_LOOK = "the log of its processes says more; rollout.sglang has the settings"
VARIABLES = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the spare tokens
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probabilities are those of the distribution that was drawn from
    "SGLANG_MAX_NEW_TOKENS_LIMIT": "0",
}
"""Environment variables of SGLang's processes."""


def engine_arguments(
    model: ModelConfig, settings: SglangEngineConfig, *, load_real_weights: bool, on_cpu: bool
) -> dict[str, Any]:
    """The keyword arguments of SGLang's Engine. Raises ConfigError: a missing directory."""
    check_path(model.path)
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.inference_dtype,
        "load_format": "auto" if load_real_weights else "dummy",
        "random_seed": 0,
        "tp_size": settings.tensor_parallel_size,
        "context_length": settings.context_tokens + SPARE_TOKENS,
        "max_running_requests": settings.max_running_requests,
        "max_total_tokens": settings.max_total_tokens,
        "mem_fraction_static": settings.memory_share,
        "stream_interval": settings.stream_interval,
        "disable_radix_cache": settings.disable_radix_cache,
        "disable_overlap_schedule": settings.disable_overlap_schedule,
        "disable_cuda_graph": settings.disable_cuda_graph,
        "enable_memory_saver": settings.enable_memory_saver,
        "enable_weights_cpu_backup": False,  # each sleep ends with a publish
        "skip_tokenizer_init": True,
        "enable_custom_logit_processor": True,
        "custom_weight_loader": [LOADER],
        "watchdog_timeout": _WATCHDOG_S,
        "sleep_on_idle": True,  # otherwise an idle scheduler takes a whole core
        "log_level": "warning",
    }
    if on_cpu:
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "max_total_tokens": settings.max_total_tokens or _CPU_KV_TOKENS,
            "mem_fraction_static": settings.mem_fraction_static or 0.5,
        }
    if settings.record_experts:  # which older versions do not know
        arguments["enable_return_routed_experts"] = True
    return arguments | settings.server_args


def runs_on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


class HostProcess:
    """SGLang's process and the connection to it. Owns both, and the directory of its sockets and temporary files."""

    def __init__(self, on_outputs: Callable[[list[Output]], None]) -> None:
        """`on_outputs` is called in the event loop, in the order of the outputs."""
        self._on_outputs = on_outputs
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self.directory = Path()
        self._left: list[Path] = []
        """Left behind if SGLang is killed: its directory and its shared memory."""

    async def start(self, arguments: dict[str, Any], *, on_cpu: bool) -> dict[str, Any]:
        """`arguments`: of SGLang's Engine. Returns {vocab_size, eos}.

        Raises ConfigError: SGLang cannot be used; GenerationError: it does not start.
        """
        # The run's directory, if there is one, is removed with the run, even after a kill during the start.
        scratch = os.environ.get("ASYNCRL_SGLANG_SCRATCH")
        self.directory = Path(tempfile.mkdtemp(prefix="asyncrl-sglang-", dir=scratch))
        self._left = [self.directory]
        # Closing our end tells the process to exit, however this process ends.
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "asyncrl.inference.sglang.host_main", str(theirs.fileno())]
        environment = os.environ | VARIABLES | {"TMPDIR": str(self.directory)}
        if on_cpu:
            environment |= {"SGLANG_USE_CPU_ENGINE": "1"}
            environment.setdefault("OMP_NUM_THREADS", "1")  # idle threads that spin make it ten times slower
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork takes milliseconds; a thread may not outlive it
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError:
            ours.close()
            self._clean_up()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 26)
        started = self._answers[0] = asyncio.get_running_loop().create_future()
        self._write({"arguments": arguments, "owner_pid": os.getpid(), "directory": str(self.directory)})
        self._reading = asyncio.create_task(self._read(reader), name="sglang-host")
        facts = await started
        self._left = [self.directory, *map(Path, facts["segments"])]
        return facts

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of `Host`. Raises GenerationError: the method failed, or the process has ended."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            if self.death() is not None:
                raise GenerationError(str(self.death()))
            self._write((number, method, arguments))
            return await answer
        finally:
            self._answers.pop(number, None)

    def death(self) -> str | None:
        """Why the process no longer serves; None while it does."""
        ended = self._process is not None and self._process.poll() is not None
        return _ENDED if ended or (self._reading is not None and self._reading.done()) else None

    async def stop(self, timeout_s: float) -> None:
        """Ends SGLang and removes what it left. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()  # the process then ends itself and its descendants
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, timeout_s)
        # Phase 2: kill the group. A killed process cleans nothing up, so that is done here.
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a group
            try:
                await asyncio.to_thread(process.wait, timeout_s)
            except subprocess.TimeoutExpired:
                logger.exception("SGLang's process %d cannot be killed", process.pid)
        self._clean_up()

    def _clean_up(self) -> None:
        """Removes the files; the process does this itself unless it is killed."""
        directory, *segments = self._left
        for segment in segments:
            segment.unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)

    def _write(self, message: Any) -> None:
        assert self._writer is not None, "the process was started"
        self._writer.write(packed(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                message = pickle.loads(await reader.readexactly(size))  # from the process that was started here
                if message[0] == "outputs":
                    self._on_outputs(message[1])
                elif (answer := self._answers.get(message[1])) is not None and not answer.done():
                    _settle(answer, *message[2:])
        except (asyncio.IncompleteReadError, ConnectionError):
            self._clean_up()  # it has ended: `death` says so
        except Exception:  # task boundary: without the reader the process is unusable
            logger.exception("what SGLang's process sent cannot be read")
        finally:
            for number, answer in self._answers.items():
                if not answer.done():
                    answer.set_exception(GenerationError(_ENDED if number else explain("start SGLang", _ENDED, _LOOK)))


def _settle(answer: asyncio.Future[Any], result: Any, error: Any) -> None:
    if not error:
        answer.set_result(result)
    elif isinstance(error, tuple):  # of the start: (class name, message)
        if error[0] == ConfigError.__name__:
            answer.set_exception(ConfigError(error[1]))
        else:
            answer.set_exception(GenerationError(explain("start SGLang", f"{error[0]}: {error[1]}", _LOOK)))
    else:
        answer.set_exception(GenerationError(error))
