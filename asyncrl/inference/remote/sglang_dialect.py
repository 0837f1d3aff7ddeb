"""Dialect of `python -m sglang.launch_server`: bodies of requests, answers and calls."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.errors import BadRequest, ConfigError, GenerationError, explain
from asyncrl.inference.remote.dialect import ASK_S, DOCS, AnswerReader, Labels, ModelTokens
from asyncrl.inference.remote.publish_calls import ReloadPublishCalls
from asyncrl.inference.remote.server_client import Call, ServerClient
from asyncrl.inference.remote.sglang_facts import MODEL, STATE, SglangFacts, require_usable
from asyncrl.inference.sglang.outputs import output_of
from asyncrl.inference.sglang.sampling_params import Asked, asked
from asyncrl.inference.shared.publish_calls import PublishCalls
from asyncrl.inference.shared.stamped_stream import Output
from asyncrl.types import GenerationRequest, ModelFacts

GENERATE = "/generate"
_FILTER = json.dumps({"callable": b"casyncrl.inference.sglang.logit_filter\nLogitFilter\n.".hex()})
"""`LogitFilter` as SGLang's `CustomLogitProcessor.to_str` writes it: its name, pickled."""
HOT, COLD = 1e6, 2e-6
"""Temperatures at which the distribution is uniform, and at which one token is certain. Below 1e-6 SGLang is greedy and
reports log-probabilities at temperature 1."""
_NEAR = 0.01


def body_of(asked: Asked) -> dict[str, Any]:
    """As `VllmDialect.body_of`."""
    body = {
        "rid": asked.rid,
        "input_ids": asked.input_ids,
        "sampling_params": asked.sampling_params,
        "return_logprob": True,
        "stream": True,
        "extra_key": asked.extra_key,
    }
    if asked.filters is not None:
        params = asked.sampling_params | {"custom_params": asked.filters}
        return body | {"sampling_params": params, "custom_logit_processor": _FILTER}
    return body


class SglangReader(AnswerReader):
    """If SGLang ignores the request's stop tokens, the response is cut here; its last line, after
    the abort, still reports the versions of its tokens."""

    def __init__(self, asked_id: str, labels: Labels, *, incremental: bool, stops: Collection[int], cut: bool) -> None:
        """
        Args:
            asked_id: the request's id, for messages.
            stops: tokens that end the response.
            cut: SGLang ignores `stops`.
        """
        self._id, self._labels, self._incremental = asked_id, labels, incremental
        self._stops, self._cut = list(stops), cut
        self._sent = 0
        self._last = -1
        """Last token received."""
        self._end: int | None = None
        """Length of a response that was cut."""

    def _output(self, held: Any) -> Output | None:
        if "error" in held:
            error = held["error"]
            raise self._refusal(error if isinstance(error, dict) else {"message": error})
        self._labels.version(str(held["meta_info"].get("weight_version")))
        output = output_of("", held, self._sent, incremental=self._incremental)
        if output.error:
            finish = held["meta_info"]["finish_reason"]
            raise self._refusal({"message": finish.get("message"), "code": finish.get("status_code")})
        first = self._sent
        self._sent += len(output.ids)
        if len(output.ids):
            self._last = int(output.ids[-1])
        if output.spans is not None:
            spans = tuple((self._labels.version(label), start) for label, start in output.spans)
            output = replace(output, spans=spans)
        if self._cut and self._end is None and (at := np.flatnonzero(np.isin(output.ids, self._stops))).size:
            self._end = first + int(at[0]) + 1
        if self._end is not None:
            return self._shortened(output, first, self._end)
        if output.reason == "stop" and self._last not in self._stops:
            return replace(output, reason="abort")  # the model's own end token is not the request's: it resumes
        return output

    def _shortened(self, output: Output, first: int, end: int) -> Output:
        """`first`: index of the output's first token. `end`: length of the cut response."""
        self.over = output.reason is None
        kept = max(0, end - first)
        spans = output.spans and tuple(span for span in output.spans if span[1] < end)
        reason = None if output.reason is None else "stop"
        return replace(output, ids=output.ids[:kept], logprobs=output.logprobs[:kept], reason=reason, spans=spans)

    def _refusal(self, error: dict[str, Any]) -> GenerationError:
        told = str(error.get("message"))[:500]
        kind = BadRequest if error.get("code") in (400, 422) else GenerationError
        found = f"the server answers {told}"
        return kind(explain(f"generate {self._id!r}", found, "look at the log of the server"))


def misreported(hot: Sequence[float], vocab_size: int) -> str | None:
    """The fault of log-probabilities of tokens drawn at temperature `HOT`, or None. Each should be -log(vocab_size); if
    they differ, they are at temperature 1. The test is inconclusive for weights that are uniform at `COLD` too
    (`is_flat`)."""
    mean = statistics.fmean(hot)
    if max(hot) - min(hot) > _NEAR:
        return "it reports log-probabilities before temperature, not those of the distribution that it samples from"
    if abs(mean + math.log(vocab_size)) > _NEAR:
        return f"it samples from {math.exp(-mean):.0f} tokens, the model has {vocab_size}"
    return None


def is_flat(hot: Sequence[float], cold: float) -> bool:
    """Whether temperature makes no difference, as with the random weights of `--load-format dummy`."""
    return abs(cold - statistics.fmean(hot)) < _NEAR


_HOT_TOKENS = 8
_RESUME = Call("/continue_generation", {})


class SglangDialect:
    """An SGLang server. It notices a closed connection only after seconds, so requests are aborted by name. The methods
    are those of `VllmDialect`."""

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
