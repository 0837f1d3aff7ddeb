"""Bodies of requests to an SGLang server, and its answers. Pure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.errors import BadRequest, GenerationError, explain
from asyncrl.inference.remote.dialect import AnswerReader, Labels
from asyncrl.inference.sglang.outputs import output_of
from asyncrl.inference.sglang.sampling_params import Asked
from asyncrl.inference.shared.stamped_stream import Output

GENERATE = "/generate"
_FILTER = json.dumps({"callable": b"casyncrl.inference.sglang.logit_filter\nLogitFilter\n.".hex()})
"""`LogitFilter` as SGLang's `CustomLogitProcessor.to_str` writes it: its name, pickled."""
HOT, COLD = 1e6, 2e-6
"""Temperatures at which the distribution is uniform, and at which one token is certain. Below 1e-6 SGLang is greedy and
reports log-probabilities at temperature 1."""
_NEAR = 0.01


def body_of(asked: Asked) -> dict[str, Any]:
    """As `ServerDialect.body_of`."""
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
