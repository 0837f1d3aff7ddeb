"""Starts vLLM: arguments, environment, and the thread that owns its processes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from concurrent.futures import Future
from multiprocessing import connection
from typing import Any

from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path
from asyncrl.config.rollout import VllmEngineConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.cpu_time import yield_to_others
from asyncrl.inference.vllm.scheduler_counts import VARIABLE, SchedulerCounts, scheduler_class
from asyncrl.inference.vllm.support import RECORDING, check_vllm
from asyncrl.types import ModelFacts

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "asyncrl.inference.vllm.weight_transfer.WorkerExtension"
BACKEND = "asyncrl"
"""Name of our weight-transfer engine in vLLM."""
OWNER_VARIABLE = "ASYNCRL_VLLM_OWNER_PID"
"""Environment variable of vLLM's processes: id of the process whose death ends them. Not in vLLM's additional_config,
which is part of its compile-cache key: every start would recompile."""

_CPU_KV_CACHE_BYTES = 1 << 30
_CPU_KV_SPARE = 2
"""On a CPU the KV cache is this multiple of what all requests need together, up to the size above; the surplus caches
prompts. More would slow the start, when vLLM clears all of it."""
_MORE_BLOCKS = 2
"""Spare blocks per request: one that vLLM leaves unused, one for a sliding window that starts within a block."""
_ANY_CPU = "fp8_per_channel"
"""The quantisation that needs no special CPU instructions."""
_SHUTDOWN_S = 5.0
"""Time for vLLM's processes to end by themselves before they are killed."""


def engine_arguments(
    model: ModelConfig, settings: VllmEngineConfig, *, load_real_weights: bool, on_cpu: bool
) -> dict[str, Any]:
    """The keyword arguments of AsyncEngineArgs. Raises ConfigError: a missing directory, or a quantisation that vLLM
    does not support here."""
    check_path(model.path)
    _check_quantization(model, settings, on_cpu=on_cpu)
    return {
        "model": model.path,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.inference_dtype,
        "quantization": settings.quantization,
        # Encoders of images come from the files: no publish has them.
        "load_format": "auto" if load_real_weights or model.image_directory is not None else "dummy",
        "seed": 0,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "max_model_len": settings.context_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        # After a prompt chunk vLLM rewinds the request's generator, which CPU generators do not support.
        "enable_chunked_prefill": not on_cpu,
        "gpu_memory_utilization": settings.memory_share,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes or (_CPU_KV_CACHE_BYTES if on_cpu else None),
        "enable_prefix_caching": settings.enable_prefix_caching,
        "stream_interval": settings.stream_interval,
        "enforce_eager": settings.enforce_eager,
        "enable_sleep_mode": settings.enable_sleep_mode,
        "skip_tokenizer_init": not settings.structured_outputs and model.image_directory is None,
        "language_model_only": model.image_directory is None,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": settings.max_logprobs,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        **({RECORDING: True} if settings.record_experts else {}),
        **(_cpu_arguments() if on_cpu else {}),
        **settings.engine_args,
    }


def _is_recurrent(model: ModelConfig) -> bool:
    from transformers import AutoConfig

    hub = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    return bool(ModelFacts.of_config(model.path, AutoConfig.from_pretrained(model.path, **hub).to_dict()).mixing)


def _check_quantization(model: ModelConfig, settings: VllmEngineConfig, *, on_cpu: bool) -> None:
    asked = settings.quantization
    if asked is None:
        return
    settings.check_dtype(model.inference_dtype, key="vllm", dtype_key="inference_dtype")
    if on_cpu and asked != _ANY_CPU and not _has_amx():
        found = f"on a CPU without AMX vLLM has kernels for {_ANY_CPU} only"
        do = f"set vllm.quantization={_ANY_CPU}, or leave it out"
        raise ConfigError(explain(f"vllm.quantization={asked}", found, do))


def _cpu_arguments() -> dict[str, Any]:
    """The instruction set of this CPU, for vLLM's compile-cache key, which lacks it: cached code depends on the vector
    width, and computes wrong results on a different CPU that shares the cache. And without its rotary kernel for CPUs,
    which turns interleaved heads (DeepSeek, GLM-4) wrongly."""
    import torch

    kernels = {"custom_ops": ["-rotary_embedding"]}
    return {"additional_config": {"cpu": torch.backends.cpu.get_cpu_capability()}, "compilation_config": kernels}


def _has_amx() -> bool:
    import torch

    return bool(torch.cpu.get_capabilities().get("amx_tile"))


def owner_pid() -> int:
    """In a process of vLLM: id of the process that started it."""
    return int(os.environ[OWNER_VARIABLE])


class Launcher:
    """Owns the thread that starts vLLM, stays alive while it runs, and shuts it down.

    It must be one thread, because Linux kills the processes when the thread that created them ends
    (`shared/orphan_watch.py`). The event loop stays free while vLLM loads.
    """

    def __init__(self, model: ModelConfig, settings: VllmEngineConfig, *, load_real_weights: bool) -> None:
        self.started: Future[Any] = Future()
        """The AsyncLLM, or the exception: ConfigError or vLLM's own."""
        self.counts: SchedulerCounts | None = None
        """None before the start, and with a user-defined scheduler."""
        self._model, self._settings = model, settings
        self._load_real_weights = load_real_weights
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="vllm-launcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends vLLM's processes; blocks. Returns False if that takes longer than `timeout_s`."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self.started.done():
            self.started = Future()  # vLLM logs errors if its objects are deleted at interpreter exit
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            check_vllm()
            if "scheduler_cls" not in self._settings.engine_args:
                self.counts = SchedulerCounts()
            llm = self._launch()
        except BaseException as error:  # noqa: BLE001 - task boundary: the waiter of `started` gets it
            self.started.set_exception(error)
            return
        finally:
            if self.counts is not None:
                self.counts.unlink()
        self.started.set_result(llm)
        self._stop.wait()
        llm.shutdown(timeout=_SHUTDOWN_S)

    def _launch(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.system_utils import set_env_var
        from vllm.v1.engine.async_llm import AsyncLLM

        settings, counts = self._settings, self.counts
        on_cpu = current_platform.is_cpu()
        arguments = engine_arguments(self._model, settings, load_real_weights=self._load_real_weights, on_cpu=on_cpu)
        if on_cpu and arguments["enable_prefix_caching"] and _is_recurrent(self._model):
            logger.warning("vLLM's prefix cache is off: that of recurrent layers needs chunked prefills, not on a CPU")
            arguments["enable_prefix_caching"] = False
        with contextlib.ExitStack() as environment:  # vLLM reads these from the environment only
            environment.enter_context(set_env_var(OWNER_VARIABLE, str(os.getpid())))
            if counts is not None:
                environment.enter_context(set_env_var(VARIABLE, str(counts.path)))
            if on_cpu:
                if settings.tensor_parallel_size == 1:  # the worker then lives in EngineCore: one process fewer
                    environment.enter_context(set_env_var("VLLM_ENABLE_V1_MULTIPROCESSING", "0"))
                environment.enter_context(set_env_var("VLLM_CPU_OMP_THREADS_BIND", "nobind"))
            # As vLLM's own server: without a context a step computes as few tokens as on the smallest GPU.
            config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
            if on_cpu:
                yield_to_others()  # vLLM's processes inherit this thread's priority
                if config.cache_config.kv_cache_memory_bytes == _CPU_KV_CACHE_BYTES:  # neither recipe nor user chose
                    config.cache_config.kv_cache_memory_bytes = cpu_kv_cache_bytes(config, settings)
            scheduler = config.scheduler_config
            if counts is not None and scheduler.scheduler_cls is None:
                scheduler.scheduler_cls = scheduler_class(asynchronous=bool(scheduler.async_scheduling))
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def death_of(llm: Any) -> str | None:
    """Why vLLM's EngineCore no longer serves; None while it does."""
    manager = llm.engine_core.resources.engine_manager
    if manager is not None:
        with contextlib.suppress(ValueError):  # the processes were closed: see `errored`
            gone = connection.wait([process.sentinel for process in manager.processes], timeout=0)
            if gone:
                return "vLLM's EngineCore process ended"
    return "vLLM's EngineCore died" if llm.errored else None


def cpu_kv_cache_bytes(config: Any, settings: VllmEngineConfig) -> int:
    """KV cache bytes for all requests, if every layer has keys and values; otherwise the maximum. `config`: vLLM's."""
    model, parallel = config.model_config, config.parallel_config
    if model.is_hybrid or model.is_attention_free:
        return _CPU_KV_CACHE_BYTES
    heads, layers = model.get_num_kv_heads(parallel), model.get_num_layers(parallel)
    token_bytes = 2 * heads * layers * model.get_head_size() * model.dtype.itemsize
    block = config.cache_config.block_size
    blocks = settings.max_num_seqs * (math.ceil(model.max_model_len / block) + _MORE_BLOCKS)
    return min(_CPU_KV_CACHE_BYTES, _CPU_KV_SPARE * blocks * block * token_bytes)
