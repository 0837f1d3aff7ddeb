"""Dialect of `vllm serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.inference.remote.dialect import AnswerReader, Labels, ModelTokens, ServerDialect
from asyncrl.inference.remote.publish_calls import ExtensionPublishCalls, ReloadPublishCalls
from asyncrl.inference.remote.server_client import Call, ServerClient
from asyncrl.inference.remote.vllm_facts import ServerFacts, require_usable
from asyncrl.inference.remote.vllm_requests import ABORT, GENERATE, abort_id, body_of, output_of
from asyncrl.inference.shared.publish_calls import PublishCalls
from asyncrl.inference.shared.stamped_stream import Output
from asyncrl.types import GenerationRequest, ModelFacts


class VllmDialect(ServerDialect):
    """A vLLM server. Its requests end with their connections."""

    generate = GENERATE
    alive = "/health"
    state = "/weight_info"
    aborts_by_name_only = False
    filters = True

    def __init__(self, facts: ServerFacts) -> None:
        self._facts = facts
        self.needs_model = facts.vocab_size is None

    @property
    def vocab_size(self) -> int:
        assert self._facts.vocab_size is not None, "it was looked up"
        return self._facts.vocab_size

    def of_model(self, tokens: ModelTokens) -> Self:
        return type(self)(replace(self._facts, vocab_size=tokens.vocab_size, tied=tokens.tied))

    def require_usable(self, url: str, remote: RemoteEngineConfig, model: ModelFacts | None = None) -> None:
        require_usable(url, self._facts, remote, model)

    def wake(self, label: str) -> Sequence[Call]:
        return ()

    def take_over(self) -> Sequence[Call]:
        return Call("/pause", params={"mode": "abort", "clear_cache": "true"}), self.unfreeze()

    async def prove(self, client: ServerClient, url: str) -> bool:
        return True  # `ask_vllm` has learned everything

    def freeze(self) -> Sequence[Call]:
        return (Call("/pause", params={"mode": "keep", "clear_cache": "false"}),)

    def unfreeze(self) -> Call:
        return Call("/resume")

    def relabel(self, label: str) -> Call:
        return Call("/update_weight_version", {"new_version": label})

    def label_in(self, alive: Any, state: Any) -> str:
        return str(state.get("weight_version") if isinstance(state, dict) else state)  # a page of a gateway, say

    def aborts(self, rids: Sequence[str]) -> Sequence[Call]:
        return (Call(ABORT, {"request_ids": [abort_id(rid) for rid in rids]}),)

    def body_of(self, request: GenerationRequest, *, rid: str, cache_salt: str) -> dict[str, Any]:
        return body_of(request, rid=rid, cache_salt=cache_salt, vocab_size=self.vocab_size)

    def reader(self, request: GenerationRequest, labels: Labels) -> AnswerReader:
        return _Reader(labels)

    def publish_calls(self, client: ServerClient, remote: RemoteEngineConfig) -> PublishCalls:
        if remote.weights == "extension":
            return ExtensionPublishCalls(client, self._facts.data_parallel)
        return ReloadPublishCalls(client, _reload)


class _Reader:
    """Lines are deltas."""

    over = False

    def __init__(self, labels: Labels) -> None:
        self._labels = labels

    def take(self, line: str) -> Output | None:
        return output_of(line, self._labels)


def _reload(directory: str) -> Call:
    body = {"method": "reload_weights", "args": [], "kwargs": {"weights_path": directory}}
    return Call("/collective_rpc", body)
