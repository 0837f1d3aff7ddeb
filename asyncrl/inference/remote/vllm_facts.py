"""A vLLM server's description of itself, and whether a run can use the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.remote.dialect import ASK_S, DOCS, require_key, require_same_model, require_setting, require_up
from asyncrl.inference.remote.server_client import Call, Refused, ServerClient
from asyncrl.json_records import from_plain
from asyncrl.types import ModelFacts

EXTENSION = "asyncrl.inference.remote.vllm_extension.ServeExtension"
"""Value of `--worker-extension-cls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server. None: not reported; without the extension, nothing is reported about the model.

    Attributes:
        vocab_size: size of the vocabulary that it samples from.
        world_size: workers per engine, over tensor and pipeline parallelism.
        data_parallel: number of engines; each has all weights except experts, which the engines share.
        pipeline_parallel: stages of one engine.
        tied: the output layer shares the embeddings.
        dummy: started with random weights and no file loader.
        transfer: backend of its `--weight-transfer-config`; None without.
    """

    max_model_len: int
    world_size: int
    logprobs_mode: str
    device: str
    chunked_prefill: bool
    dummy: bool
    data_parallel: int = 1
    pipeline_parallel: int = 1
    architecture: str | None = None
    vocab_size: int | None = None
    tied: bool | None = None
    transfer: str | None = None


async def ask_vllm(client: ServerClient, remote: RemoteEngineConfig, version: str) -> ServerFacts:
    """Asks a vLLM server of this version for its `ServerFacts`; read-only. Raises the errors of `ask`."""
    try:
        await client.get("/health", timeout_s=ASK_S)
    except Refused as error:
        require_up(error)
    named = f"vLLM {version}"
    await _require_routes(client, named)
    told = _from_server_info(client.url, await _get(client, "/server_info", named, params={"config_format": "json"}))
    if remote.weights != "extension":
        return told
    # A worker of a dense model does not know the other engines.
    return replace(await _described(client, named), data_parallel=told.data_parallel)


def require_usable(url: str, facts: ServerFacts, remote: RemoteEngineConfig, model: ModelFacts | None = None) -> None:
    """As `VllmDialect.require_usable`."""
    _require_settings(url, facts, remote)
    _require_start(url, facts, remote)
    if model is not None:
        if remote.weights == "native" and facts.device == "cpu":
            found, do = "it runs on a CPU, where vLLM's backend nccl receives nothing", "serve on GPUs, or use weights="
            raise ConfigError(explain(f"{url} with rollout.remote.weights=native", found, f"{do}extension or reload"))
        require_same_model(url, model, facts.architecture, facts.vocab_size)
        if "rotary positions of kind longrope" in model.unusual and facts.max_model_len != remote.context_tokens:
            found = f"its rotary factors (longrope) follow --max-model-len, which is {facts.max_model_len} there"
            do = f"start it with --max-model-len {remote.context_tokens}, or set rollout.remote.max_model_len"
            asked = f"{url} with rollout.remote.max_model_len={remote.context_tokens}"
            raise ConfigError(explain(asked, found, do))


def _require_settings(url: str, facts: ServerFacts, remote: RemoteEngineConfig) -> None:
    found = f"the server has {facts.world_size} worker(s) in an engine"
    require_setting(url, "tensor_parallel_size", remote.tensor_parallel_size, facts.world_size, found)
    found = f"the server has {facts.data_parallel} engine(s)"
    require_setting(url, "data_parallel_size", remote.data_parallel_size, facts.data_parallel, found)
    if facts.max_model_len < remote.context_tokens:
        asked = f"{url} with rollout.remote.max_model_len={remote.context_tokens}"
        found = f"the server takes {facts.max_model_len} tokens of prompt and response"
        do = f"start it with --max-model-len {remote.context_tokens}, or lower rollout.remote.max_model_len"
        raise ConfigError(explain(asked, found, do))


def _require_start(url: str, facts: ServerFacts, remote: RemoteEngineConfig) -> None:
    if facts.logprobs_mode != "processed_logprobs":
        found = f"it reports {facts.logprobs_mode}: not those of the distribution that it samples from"
        do = f"start it with --logprobs-mode processed_logprobs; {DOCS}"
        raise ConfigError(explain(f"log-probabilities of {url}", found, do))
    if facts.device == "cpu" and facts.chunked_prefill:
        found = "it computes prompts in parts, and on a CPU vLLM then fails requests that have a seed"
        do = f"start it with --no-enable-chunked-prefill; {DOCS}"
        raise ConfigError(explain(f"{url}, a server on a CPU", found, do))
    asked = f"{url} with rollout.remote.weights={remote.weights}"
    if remote.weights == "native" and facts.transfer != "nccl":
        found = f"the backend of its --weight-transfer-config is {facts.transfer or 'not set'}"
        do = f"""start it with --weight-transfer-config '{{"backend": "nccl"}}'; {DOCS}"""
        raise ConfigError(explain(asked, found, do))
    if remote.weights != "extension":
        _require_reload(asked, facts, reads_files=remote.weights == "reload")
    if remote.weights != "reload" and facts.pipeline_parallel > 1:
        do = "start it with --pipeline-parallel-size 1, or set rollout.remote.weights=reload and weights.transport=disk"
        raise ConfigError(explain(asked, f"the model is cut into {facts.pipeline_parallel} pipeline stages", do))


def _require_reload(asked: str, facts: ServerFacts, *, reads_files: bool) -> None:
    if reads_files and facts.dummy:
        found = "it was started with --load-format dummy, and reads no files"
        raise ConfigError(explain(asked, found, "start it with the model's files, or use weights=extension"))
    if facts.device == "cpu" and facts.tied:
        found = "on a CPU vLLM's reload leaves the output layer of a model with tied embeddings as it was"
        do = f"start it with --worker-extension-cls {EXTENSION}, and set rollout.remote.weights=extension"
        raise ConfigError(explain(asked, found, do))


async def _require_routes(client: ServerClient, version: str) -> None:
    """Raises ConfigError: the server lacks routes that a run needs, or refuses the key."""
    await _get(client, "/v1/models", version)
    await _get(client, "/weight_info", version)
    try:  # an existing route refuses an empty request with 400 or 422
        await client.send(Call("/inference/v1/generate", {}), ASK_S)
    except Refused as error:
        if error.status in (400, 422):
            return
        raise _lacks(client, version, "/inference/v1/generate", error) from error


async def _get(client: ServerClient, path: str, version: str, **params: Any) -> Any:
    try:
        return await client.get(path, timeout_s=ASK_S, **params)
    except Refused as error:
        raise _lacks(client, version, path, error) from error


def _lacks(client: ServerClient, version: str, path: str, error: Refused) -> ConfigError:
    asked = f"{path} of {client.url} ({version})"
    require_key(client.url, version, path, error)
    flag = "--enable-scale-out" if path.startswith("/inference") else "VLLM_SERVER_DEV_MODE=1"
    do = f"start a vLLM of version 0.32 or newer with {flag}; {DOCS}"
    return ConfigError(explain(asked, str(error), do))


async def _described(client: ServerClient, version: str) -> ServerFacts:
    asked = f"asyncrl in the workers of {client.url} ({version})"
    try:
        workers = await client.call_workers("asyncrl_describe", [], ASK_S)
    except Refused as error:
        require_up(error)
        do = f"start it with --worker-extension-cls {EXTENSION}, asyncrl installed beside it; or set "
        raise ConfigError(explain(asked, str(error), f"{do}rollout.remote.weights=reload")) from error
    try:
        return from_plain(ServerFacts, workers[0])
    except (ValueError, IndexError) as error:
        found = f"they describe themselves in another way: {error}"
        raise ConfigError(explain(asked, found, "install the same version of asyncrl on both sides")) from error


def _from_server_info(url: str, info: Any) -> ServerFacts:
    """Reads vLLM's description of its configuration. Raises ConfigError: unknown form."""

    def at(*path: str) -> Any:
        value = info
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    config, parallel = "vllm_config", ("vllm_config", "parallel_config")
    # Missing entries become None, which `from_plain` rejects by name where the field needs a value.
    plain = {
        "max_model_len": at(config, "model_config", "max_model_len"),
        "world_size": at(*parallel, "world_size"),
        "data_parallel": at(*parallel, "data_parallel_size") or 1,
        "pipeline_parallel": at(*parallel, "pipeline_parallel_size") or 1,
        "logprobs_mode": at(config, "model_config", "logprobs_mode"),
        "device": at(config, "device_config", "device_type") or at(config, "device_config", "device"),
        "chunked_prefill": at(config, "scheduler_config", "enable_chunked_prefill"),
        "dummy": at(config, "load_config", "load_format") == "dummy",
        "transfer": at(config, "weight_transfer_config", "backend"),
    }
    try:
        return from_plain(ServerFacts, plain)
    except ValueError as error:
        found = f"its description has another form: {error}"
        do = "use a vLLM of version 0.32, or rollout.remote.weights=extension"
        raise ConfigError(explain(f"/server_info of {url}", found, do)) from error
