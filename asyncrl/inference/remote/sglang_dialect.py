"""Dialect of `python -m sglang.launch_server`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.remote.dialect import ASK_S, DOCS, AnswerReader, Labels, ModelTokens, ServerDialect
from asyncrl.inference.remote.publish_calls import ReloadPublishCalls
from asyncrl.inference.remote.server_client import Call, ServerClient
from asyncrl.inference.remote.sglang_facts import MODEL, STATE, SglangFacts, require_usable
from asyncrl.inference.remote.sglang_requests import COLD, GENERATE, HOT, SglangReader, body_of, is_flat, misreported
from asyncrl.inference.sglang.sampling_params import Asked, asked
from asyncrl.inference.shared.publish_calls import PublishCalls
from asyncrl.types import GenerationRequest, ModelFacts

_HOT_TOKENS = 8
_RESUME = Call("/continue_generation", {})


class SglangDialect(ServerDialect):
    """An SGLang server. It notices a closed connection only after seconds, so requests are aborted by name."""

    generate = GENERATE
    alive = MODEL
    state = STATE
    aborts_by_name_only = True

    def __init__(self, facts: SglangFacts, tokens: ModelTokens | None = None) -> None:
        self._facts = facts
        self._tokens = tokens
        self.needs_model = tokens is None
        self.filters = facts.filters

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def of_model(self, tokens: ModelTokens) -> Self:
        return type(self)(self._facts, tokens)

    def require_usable(self, url: str, remote: RemoteEngineConfig, model: ModelFacts | None = None) -> None:
        require_usable(url, self._facts, remote, model)

    def wake(self, label: str) -> Sequence[Call]:
        """Resumes first: `/health` samples a token, which a paused server cannot."""
        return self.relabel(label), _RESUME, Call("/health", method="GET")

    def take_over(self) -> Sequence[Call]:
        return Call("/pause_generation", {"mode": "abort"}), _RESUME

    async def prove(self, client: ServerClient, url: str) -> bool:
        hot = await _logprobs(client, HOT, _HOT_TOKENS)
        (cold,) = await _logprobs(client, COLD, 1)
        if found := misreported(hot, self.vocab_size):
            do = f"start it without SGLANG_RETURN_ORIGINAL_LOGPROB, on the model that is trained; {DOCS}"
            raise ConfigError(explain(f"log-probabilities of {url}", found, do))
        return not is_flat(hot, cold)

    def freeze(self) -> Sequence[Call]:
        """The answer to a pause does not wait for the scheduler, so a `STATE` call follows, whose answer does.

        With overlap scheduling, a step computed ahead would count for the next version. Such servers retract requests
        to the queue and recompute their KV cache.
        """
        mode = "retract" if self._facts.steps_ahead else "in_place"
        return Call("/pause_generation", {"mode": mode}), Call(STATE, method="GET")

    def unfreeze(self) -> Call:
        return _RESUME

    def relabel(self, label: str) -> Call:
        return Call("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def label_in(self, alive: Any, state: Any) -> str:
        return str(alive.get("weight_version") if isinstance(alive, dict) else alive)

    def aborts(self, rids: Sequence[str]) -> Sequence[Call]:
        """SGLang aborts by prefix; our ids have equal lengths."""
        return [Call("/abort_request", {"rid": rid}) for rid in rids]

    def body_of(self, request: GenerationRequest, *, rid: str, cache_salt: str) -> dict[str, Any]:
        return body_of(self._asked(request, rid=rid, extra_key=cache_salt))

    def reader(self, request: GenerationRequest, labels: Labels) -> AnswerReader:
        stops = self._asked(request).stops
        return SglangReader(
            request.request_id,
            labels,
            incremental=self._facts.incremental,
            stops=request.sampling.stop_token_ids,
            cut=bool(stops),
        )

    def publish_calls(self, client: ServerClient, remote: RemoteEngineConfig) -> PublishCalls:
        return ReloadPublishCalls(client, _reload)

    def _asked(self, request: GenerationRequest, *, rid: str = "", extra_key: str = "") -> Asked:
        model = self._model
        return asked(request, rid=rid, extra_key=extra_key, vocab_size=model.vocab_size, eos=model.eos)

    @property
    def _model(self) -> ModelTokens:
        assert self._tokens is not None, "it was looked up"
        return self._tokens


def _reload(directory: str) -> Call:
    """Keeps the prompt cache: each set of weights has its own salt, and if a frozen request uses the cache, SGLang
    refuses to flush it after it has already changed the weights."""
    return Call("/update_weights_from_disk", {"model_path": directory, "load_format": "auto", "flush_cache": False})


async def _logprobs(client: ServerClient, temperature: float, tokens: int) -> list[float]:
    params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": [0], "sampling_params": params, "return_logprob": True}
    answer = await client.send(Call(GENERATE, body), ASK_S)
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
