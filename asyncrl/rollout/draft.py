"""A response in progress: the tokens that have arrived, and the finished response that they become."""

from __future__ import annotations

import numpy as np

from asyncrl.types import FinishReason, Generation, SamplingParams, Segment, TokenChunk


class Draft:
    """Every token of one response that has arrived so far, over all attempts; readable at any moment.

    Args:
        prior: the tokens that the response already has, perhaps from another process.
    """

    __slots__ = ("_cached_tokens", "_chunks", "num_tokens")

    def __init__(self, prior: Generation | None = None) -> None:
        self._chunks: list[tuple[TokenChunk, int]] = []
        self._cached_tokens: int | None = None
        self.num_tokens = 0
        for s in prior.segments if prior is not None else ():
            assert prior is not None
            ids, logprobs = prior.token_ids[s.start : s.stop], prior.logprobs[s.start : s.stop]
            self.add(TokenChunk("", ids, logprobs, s.version), s.replica_id)

    def add(self, chunk: TokenChunk, replica_id: int) -> None:
        if chunk.finish_reason is not None and self._cached_tokens is None:
            self._cached_tokens = chunk.cached_tokens
        if len(chunk.token_ids):
            self._chunks.append((chunk, replica_id))
            self.num_tokens += len(chunk.token_ids)

    @property
    def token_ids(self) -> np.ndarray:
        """[T] int32."""
        return np.concatenate([np.zeros(0, np.int32), *(chunk.token_ids for chunk, _ in self._chunks)])

    @property
    def logprobs(self) -> np.ndarray:
        """[T] float32."""
        return np.concatenate([np.zeros(0, np.float32), *(chunk.logprobs for chunk, _ in self._chunks)])

    @property
    def segments(self) -> tuple[Segment, ...]:
        """They tile `[0, T)`."""
        segments: list[Segment] = []
        at = begun = 0
        source: tuple[int, int] | None = None
        for chunk, replica_id in self._chunks:
            if source is not None and source != (chunk.version, replica_id):
                segments.append(Segment(begun, at, *source))
                begun = at
            source = chunk.version, replica_id
            at += len(chunk.token_ids)
        if source is not None:
            segments.append(Segment(begun, at, *source))
        return tuple(segments)

    def complete(self, sampling: SamplingParams, reason: FinishReason | None) -> FinishReason | None:
        """The finish reason of the whole response, given that its last attempt ended with `reason` (None: the replica
        was lost). None: the response must be resumed.

        An attempt can be aborted after its last token was sampled and before the replica noticed the end.
        """
        if reason not in (None, "abort"):
            return reason
        if self._chunks and int(self._chunks[-1][0].token_ids[-1]) in sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_tokens >= sampling.max_tokens else None

    def generation(self, prompt_ids: np.ndarray, reason: FinishReason = "abort", interruptions: int = 0) -> Generation:
        """A copy of the response so far to `prompt_ids` ([P] int32). `reason`: abort while the draft continues."""
        made = self.token_ids, self.logprobs, self.segments
        return Generation(prompt_ids, *made, reason, interruptions, self._cached_tokens or 0)
