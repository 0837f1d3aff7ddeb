"""Dialect of `vllm serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.errors import GenerationError, explain
from asyncrl.inference.remote.dialect import AnswerReader, Labels, ModelTokens
from asyncrl.inference.remote.publish_calls import ExtensionPublishCalls, NativePublishCalls, ReloadPublishCalls
from asyncrl.inference.remote.server_client import Call, ServerClient
from asyncrl.inference.remote.vllm_facts import ServerFacts, require_usable
from asyncrl.inference.shared.publish_calls import PublishCalls
from asyncrl.inference.shared.request_checks import samplable_stops
from asyncrl.inference.shared.stamped_stream import Output
from asyncrl.inference.vllm.sampling_params import stream_seed
from asyncrl.types import GenerationRequest, ModelFacts


class VllmDialect:
    """A vLLM server. Its requests end with their connections.

    Like `SglangDialect`, it describes the calls to one server of its kind; `RemoteEngine` makes them and decides.
    """

    generate = "/inference/v1/generate"
    """Path that samples and streams lines."""
    alive = "/health"
    """Path that answers while the server lives, even while it loads weights."""
    state = "/weight_info"
    """Path whose answer requires an answer of the sampling processes."""
    aborts_by_name_only = False
    """Closing the connection does not end a request soon; it must be aborted by name."""
    filters = True
    """top_p, top_k and min_tokens work, with log-probabilities after filtering."""

    def __init__(self, facts: ServerFacts) -> None:
        self._facts = facts
        self.needs_model = facts.vocab_size is None
        """`of_model` must be called before use."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary that the server samples from."""
        assert self._facts.vocab_size is not None, "it was looked up"
        return self._facts.vocab_size

    def of_model(self, tokens: ModelTokens) -> Self:
        """A copy completed with facts from the run's model files."""
        return type(self)(replace(self._facts, vocab_size=tokens.vocab_size, tied=tokens.tied))

    def require_usable(self, url: str, remote: RemoteEngineConfig, model: ModelFacts | None = None) -> None:
        """Raises ConfigError: the server has a different model, or lacks settings that a run needs."""
        require_usable(url, self._facts, remote, model)

    def wake(self, label: str) -> Sequence[Call]:
        """Calls that succeed once the server can sample; before, one answers `UNAVAILABLE`. They may resume requests of
        another run, which get this label."""
        return ()

    def take_over(self) -> Sequence[Call]:
        """Calls that end the requests and the pause of an earlier replica."""
        return Call("/pause", params={"mode": "abort", "clear_cache": "true"}), self.unfreeze()

    async def prove(self, client: ServerClient, url: str) -> bool:
        """Samples to verify properties that the server does not report; False: inconclusive with its weights.

        Raises ConfigError: the server cannot be used."""
        return True  # `ask_vllm` has learned everything

    def freeze(self) -> Sequence[Call]:
        """Calls that stop sampling; requests in flight stay."""
        return (Call("/pause", params={"mode": "keep", "clear_cache": "false"}),)

    def unfreeze(self) -> Call:
        return Call("/resume")

    def relabel(self, label: str) -> Call:
        """Call after which sampled tokens get this label."""
        return Call("/update_weight_version", {"new_version": label})

    def label_in(self, alive: Any, state: Any) -> str:
        """The label in the answers of `alive` and `state`."""
        return str(state.get("weight_version") if isinstance(state, dict) else state)  # a page of a gateway, say

    def aborts(self, rids: Sequence[str]) -> Sequence[Call]:
        """Calls that end these requests, whose streams then deliver their last tokens."""
        return (Call("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{rid}" for rid in rids]}),)

    def body_of(self, request: GenerationRequest, *, rid: str, cache_salt: str) -> dict[str, Any]:
        """The body of `generate`. Only `stop_token_ids` end a response; the model's own end token must be among them to
        count.

        Args:
            rid: the server's id of this attempt.
            cache_salt: requests with equal salts share the KV cache of prompts.
        """
        sampling = request.sampling
        return {
            "request_id": rid,
            "token_ids": request.prompt_ids.tolist(),
            "stream": True,
            "cache_salt": cache_salt,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": sampling.max_tokens,
                "min_tokens": sampling.min_tokens,
                "stop_token_ids": samplable_stops(request, self.vocab_size),
                "seed": stream_seed(request.seed, request.first_position),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
        }

    def reader(self, request: GenerationRequest, labels: Labels) -> AnswerReader:
        return VllmReader(labels)

    def publish_calls(self, client: ServerClient, remote: RemoteEngineConfig) -> PublishCalls:
        if remote.weights == "extension":
            return ExtensionPublishCalls(client, self._facts.data_parallel)
        if remote.weights == "native":
            return NativePublishCalls(client, self._facts.world_size * self._facts.data_parallel)
        return ReloadPublishCalls(client, _reload)


class VllmReader(AnswerReader):
    """Lines are deltas."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels

    def _output(self, held: Any) -> Output | None:
        if "error" in held:
            told = str(held["error"])[:500]
            raise GenerationError(explain("generate", f"the server answers {told}", "look at the log of the server"))
        if not held["choices"]:
            return None
        # Log-probabilities and ids are separate lists: a length mismatch would shift them silently.
        choice = held["choices"][0]
        ids, entries = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("content") or []
        if len(ids) != len(entries):
            raise ValueError(f"{len(ids)} token ids with {len(entries)} log-probabilities")
        spans, label = choice.get("weight_versions"), self._labels.version
        return Output(
            "",
            np.array(ids, np.int32),
            np.array([entry["logprob"] for entry in entries], np.float32),
            choice.get("finish_reason"),
            None if spans is None else tuple((label(str(span["version"])), span["start"]) for span in spans),
        )


def _reload(directory: str) -> Call:
    body = {"method": "reload_weights", "args": [], "kwargs": {"weights_path": directory}}
    return Call("/collective_rpc", body)
