"""An SGLang server's description of itself, and whether a run can use the server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.remote.dialect import ASK_S, DOCS, require_key, require_same_model, require_setting
from asyncrl.inference.remote.server_client import Refused, ServerClient
from asyncrl.inference.sglang.host_process import SPARE_TOKENS
from asyncrl.json_records import from_plain
from asyncrl.types import ModelFacts

STATE = "/server_info"
MODEL = "/model_info"
_SINCE = (0, 5, 19)
"""The first version whose responses report the label of each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangFacts:
    """One server.

    Attributes:
        request_tokens: longest request, prompt and response, without the tokens that SGLang reserves.
        replicas, stages: data parallel and pipeline parallel sizes.
        front_ends: number of tokenizer processes.
        speculative: algorithm of speculative decoding.
        role: disaggregation mode; "null": the server both prefills and decodes.
        steps_ahead: overlap scheduling: a step starts before the results of the last one are known.
        incremental: lines are deltas; otherwise they hold all tokens so far.
        filters: it runs custom logit processors.
        preferred: default sampling parameters that the server adds to requests, or None.
    """

    version: str
    architecture: str | None
    request_tokens: int
    tensor_parallel_size: int
    replicas: int
    stages: int
    front_ends: int
    speculative: str | None
    role: str
    steps_ahead: bool
    incremental: bool
    filters: bool
    preferred: str | None


async def ask_sglang(client: ServerClient, model: Any) -> SglangFacts:
    """Asks an SGLang server for its `SglangFacts`; read-only. `model`: its answer to `MODEL`. Raises the errors of
    `ask`."""
    try:
        info = await client.get(STATE, timeout_s=ASK_S)
    except Refused as error:
        require_key(client.url, "SGLang", STATE, error)
        do = f"start an SGLang of version {_words(_SINCE)} or newer; {DOCS}"
        raise ConfigError(explain(f"{STATE} of {client.url}", str(error), do)) from error
    return facts_from(client.url, model, info)


def facts_from(url: str, model: Any, info: Any) -> SglangFacts:
    """Raises ConfigError: unknown form, or the version is too old."""
    # A gateway may answer with anything.
    held, about = (answer if isinstance(answer, Mapping) else {} for answer in (info, model))
    version = held.get("version")
    if not isinstance(version, str) or _number(version) < _SINCE:
        found = f"it is SGLang {version}; responses name the weights of their tokens since {_words(_SINCE)}"
        raise ConfigError(explain(f"{url} as a replica", found, f"start a newer one; {DOCS}"))
    plain = {
        "version": version,
        "architecture": (about.get("architectures") or [None])[0],
        "request_tokens": held.get("max_req_input_len"),
        "tensor_parallel_size": held.get("tp_size"),
        "replicas": held.get("dp_size"),
        "stages": held.get("pp_size"),
        "front_ends": held.get("tokenizer_worker_num", 1),
        "speculative": held.get("speculative_algorithm"),
        "role": held.get("disaggregation_mode", "null"),
        "steps_ahead": not held.get("disable_overlap_schedule", False),
        "incremental": held.get("incremental_streaming_output", False),
        "filters": held.get("enable_custom_logit_processor", False),
        "preferred": str(preferred) if (preferred := about.get("preferred_sampling_params")) else None,
    }
    try:
        return from_plain(SglangFacts, plain)
    except ValueError as error:
        found = f"its description has another form: {error}"
        raise ConfigError(explain(f"{STATE} of {url} (SGLang {version})", found, "report this")) from error


def require_usable(url: str, facts: SglangFacts, remote: RemoteEngineConfig, model: ModelFacts | None) -> None:
    """As `VllmDialect.require_usable`."""
    if remote.weights != "reload":
        found = f"it is SGLang {facts.version}, whose servers take publishes as files only"
        do = "set rollout.remote.weights=reload, weights.transport=disk and weights.encoding=full"
        raise ConfigError(explain(f"{url} with rollout.remote.weights={remote.weights}", found, do))
    found = f"the server has --tp-size {facts.tensor_parallel_size}"
    require_setting(url, "tensor_parallel_size", remote.tensor_parallel_size, facts.tensor_parallel_size, found)
    found = f"it is a server of SGLang with --dp-size {facts.replicas}, and only those with 1 can be replicas"
    require_setting(url, "data_parallel_size", remote.data_parallel_size, 1, found)
    # Settings that may work, but were never tested.
    for flag, here, needed in (
        ("--dp-size", facts.replicas, 1),
        ("--pp-size", facts.stages, 1),
        ("--tokenizer-worker-num", facts.front_ends, 1),
        ("--speculative-algorithm", facts.speculative, None),
        ("--disaggregation-mode", facts.role, "null"),
    ):
        if here != needed:
            asked, found = f"{url} as a replica", f"it was started with {flag} {here}, which nobody has tried"
            raise ConfigError(explain(asked, found, f"start it without {flag}"))
    if facts.preferred is not None:
        asked = f"{url} as a replica"
        found = f"it was started with --preferred-sampling-params {facts.preferred}: it would sample by them, and the "
        found += "log-probabilities are of another distribution"
        raise ConfigError(explain(asked, found, "start it without --preferred-sampling-params"))
    if facts.request_tokens < remote.context_tokens:
        asked = f"{url} with rollout.remote.max_model_len={remote.context_tokens}"
        found = f"the server takes requests of {facts.request_tokens} tokens"
        do = f"start it with --context-length {remote.context_tokens + SPARE_TOKENS} and a KV cache that holds as many"
        raise ConfigError(explain(asked, found, f"{do}, or lower rollout.remote.max_model_len"))
    if model is not None:
        require_same_model(url, model, facts.architecture, None)


def _number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, such as 0.5.23.post1."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _words(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))
