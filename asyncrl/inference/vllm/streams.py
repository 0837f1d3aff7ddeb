"""Turns vLLM's outputs of one request into chunks with exact versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.errors import GenerationError, explain
from asyncrl.inference.shared.streams import NO_VERSION, RequestStream, spans_of
from asyncrl.types import GenerationRequest, TokenChunk
from asyncrl.types.images import as_model_ids


class VllmStream(RequestStream):
    """The adapter's record of one request to vLLM."""

    def __init__(self, request: GenerationRequest, expert_layers: Sequence[int] = (), *, image_token: int = 0) -> None:
        """`expert_layers`: indices of layers with experts; vLLM's rows have all layers. `image_token`: the model's."""
        super().__init__(request)
        self.expert_layers, self.image_token = list(expert_layers), image_token
        self._collector: Any = None
        self._starts: Sequence[tuple[str, int]] | None = None
        self._rows: list[np.ndarray] | None = None
        """vLLM's experts of this attempt's tokens, one array [n, layers, k] per step."""
        self._used = 0
        """Number of arrays of `_rows` that were read."""
        self._unused: list[np.ndarray] = []
        """Rows of tokens that have not arrived yet."""
        self._scores: tuple[np.ndarray, dict[str, np.ndarray]] | None = None
        """Log-probabilities of scored tokens, and the likeliest tokens at their positions."""

    @property
    def internal_id(self) -> str | None:
        """vLLM's id of the request; None while vLLM does not have it."""
        return None if self._collector is None else self._collector.request_id

    @property
    def behind(self) -> bool:
        """True if vLLM has output of this request that is not in `chunks` yet."""
        return self._collector is not None and self._collector.output is not None

    def enter(self, collector: Any, state: Any) -> None:
        """`state`: vLLM's RequestState, which tracks the version of each token; None if the request has already ended,
        and its last output has the versions."""
        self._collector = collector
        self._starts = None if state is None else state.weight_version_starts
        self._rows, self._used, self._unused = None, 0, []
        if state is not None and self.request.sampling.experts:
            self._rows = state.routed_experts_chunks
        self.entered.set()

    def leave(self) -> None:
        """vLLM no longer has the request."""
        self._collector, self._starts = None, None

    def take(self, output: Any, version: int | None) -> list[TokenChunk]:
        """Converts one RequestOutput (a delta) to chunks of one version each; `version` stamps an end without tokens.

        Raises GenerationError: vLLM ended the request with an error.
        """
        completion, start = output.outputs[0], self.request.sampling.score_from
        if start is not None:
            return self._scored(output, start, version)
        ids = np.asarray(completion.token_ids, np.int32)
        logprobs = _sampled(completion.logprobs, len(ids))
        # While vLLM has the request its live list is current; afterwards the last output has the versions.
        starts = self._starts
        if starts is None:
            starts = [(span.version, span.start) for span in completion.weight_versions or ()]
        records = self.request.sampling.experts and len(ids)
        extra = {"experts": self._experts(completion, len(ids))} if records else None
        chunks = self.cut(ids, logprobs, spans_of(starts, self.num_tokens, len(ids)), extra)
        if not output.finished:
            return chunks
        return self.finished(chunks, version, str(completion.finish_reason), output.num_cached_tokens or 0)

    def _experts(self, completion: Any, count: int) -> np.ndarray:
        """[count, L, k] int16 of the next tokens. Raises GenerationError: vLLM reported fewer."""
        if self._rows is None:  # the request had ended before `enter`: this is its only output
            self._unused = [] if completion.routed_experts is None else [completion.routed_experts]
        else:
            self._unused += self._rows[self._used :]
            self._used = len(self._rows)
        rows = np.concatenate(self._unused) if self._unused else np.zeros(0)
        if len(rows) < count:
            asked, found = f"generate {self.request.request_id!r}", f"experts of {len(rows)} tokens for {count}"
            do = "report this: without them the trainer would route the tokens otherwise"
            raise GenerationError(explain(asked, found, do))
        self._unused = [rows[count:]]
        return rows[:count, self.expert_layers].astype(np.int16)

    def _scored(self, output: Any, start: int, version: int | None) -> list[TokenChunk]:
        """Answers a scoring request with its prompt's log-probabilities. A request aborted before them ends without
        tokens and resumes elsewhere."""
        ids = self.request.prompt_ids[start:].astype(np.int32)
        if output.prompt_logprobs and len(output.prompt_logprobs) == len(self.request.prompt_ids):
            entries = output.prompt_logprobs[start:]
            told = as_model_ids(ids, self.image_token).tolist()
            logprobs = [entry[token].logprob for token, entry in zip(told, entries, strict=True)]
            top = self.request.sampling.score_top
            self._scores = np.array(logprobs, np.float32), _likeliest(entries, top) if top else {}
        if not output.finished:
            return []
        if self._scores is None:
            return self.finished([], version, "abort", 0)
        stamp, (logprobs, extra) = NO_VERSION if version is None else version, self._scores
        chunk = TokenChunk(self.request.request_id, ids, logprobs, stamp, extra=extra)
        return self.finished([chunk], version, "stop", 0)


def _sampled(told: Any, count: int) -> np.ndarray:
    """[count] float32 log-probabilities of the sampled tokens, the first entry of each position in vLLM's FlatLogprobs.
    Raises GenerationError: the count differs."""
    starts = told.start_indices if told else []
    if len(starts) != count:
        found = f"log-probabilities of {len(starts)} tokens for {count}"
        raise GenerationError(explain("tokens with their log-probabilities", found, "report this"))
    return np.array(told.logprobs, np.float32)[starts] if count else np.zeros(0, np.float32)


def _likeliest(entries: Sequence[Mapping[int, Any]], top: int) -> dict[str, np.ndarray]:
    """The `top` likeliest tokens at each position; vLLM's entries also contain the actual token."""
    found = [sorted(((e.logprob, token) for token, e in entry.items()), reverse=True)[:top] for entry in entries]
    return {
        "top_ids": np.array([[token for _, token in place] for place in found], np.int32),
        "top_logprobs": np.array([[logprob for logprob, _ in place] for place in found], np.float32),
    }
