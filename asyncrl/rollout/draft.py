"""A response in progress: the tokens that have arrived, and the finished response that they become."""

from __future__ import annotations

import numpy as np

from asyncrl.data.stop_strings import StopFinder
from asyncrl.types import FinishReason, Generation, SamplingParams, Segment, TokenChunk
from asyncrl.types.trajectories import packed

Span = tuple[str, float, float, dict[str, int]]
"""(name, start, end, figures); times in seconds since the epoch."""


class Draft:
    """Every token of one response that has arrived so far, over all attempts; readable at any moment. Takes 8 bytes per
    token, plus an eighth for growth.

    Args:
        prior: the tokens that the response already has, perhaps from another process.
        attempts: gets the span of every attempt; None: not recorded.
        finder: looks for stop texts from the first token on. Tokens after a completed stop text are not added.
    """

    __slots__ = ("_cached_tokens", "_ends", "_extra", "_finder", "_ids", "_logprobs", "attempts", "num_tokens")

    def __init__(
        self,
        prior: Generation | None = None,
        attempts: list[Span] | None = None,
        finder: StopFinder | None = None,
    ) -> None:
        self.attempts = attempts
        self._finder = finder
        self._ids, self._logprobs = bytearray(), bytearray()
        self._ends: list[tuple[int, int, int]] = []
        """(number of tokens up to its end, version, replica) of each run of tokens from one source."""
        self._extra: dict[str, list[np.ndarray]] = {}
        self._cached_tokens: int | None = None
        self.num_tokens = 0
        for s in prior.segments if prior is not None else ():
            assert prior is not None
            ids, logprobs = prior.token_ids[s.start : s.stop], prior.logprobs[s.start : s.stop]
            extra = {name: array[s.start : s.stop] for name, array in prior.extra.items()}
            self.add(TokenChunk("", ids, logprobs, s.version, extra=extra), s.replica_id)

    def add(self, chunk: TokenChunk, replica_id: int) -> None:
        """Raises ValueError: a token came without its log-probability."""
        if chunk.finish_reason is not None and self._cached_tokens is None:
            self._cached_tokens = chunk.cached_tokens
        count = 0 if self.stopped else len(chunk.token_ids)
        if count and self._finder is not None:
            count = self._finder.feed(chunk.token_ids.tolist())
        if not count:
            return
        if len(chunk.logprobs) != len(chunk.token_ids):
            raise ValueError(f"{len(chunk.token_ids)} tokens came with {len(chunk.logprobs)} log-probabilities")
        self._ids += packed(chunk.token_ids[:count], np.int32)
        self._logprobs += packed(chunk.logprobs[:count], np.float32)
        for name, array in chunk.extra.items():
            self._extra.setdefault(name, []).append(array[:count])
        if self._ends and self._ends[-1][1:] == (chunk.version, replica_id):
            self._ends.pop()
        self.num_tokens += count
        self._ends.append((self.num_tokens, chunk.version, replica_id))

    @property
    def looks_for_stop(self) -> bool:
        """Each token may end the response."""
        return self._finder is not None

    @property
    def stopped(self) -> bool:
        """A stop text is complete: the response ends with its current tokens."""
        return self._finder is not None and self._finder.found is not None

    @property
    def token_ids(self) -> np.ndarray:
        """[T] int32, a copy."""
        return np.frombuffer(self._ids, np.int32).copy()

    @property
    def logprobs(self) -> np.ndarray:
        """[T] float32, a copy."""
        return np.frombuffer(self._logprobs, np.float32).copy()

    @property
    def extra(self) -> dict[str, np.ndarray]:
        """The further arrays that every chunk had, [T, ...] each, copies."""
        whole = {name: np.concatenate(parts) for name, parts in self._extra.items()}
        return {name: array for name, array in whole.items() if len(array) == self.num_tokens}

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments tile `[0, T)`."""
        begun = [0, *(end for end, _, _ in self._ends)]
        return tuple(Segment(start, *source) for start, source in zip(begun, self._ends, strict=False))

    def complete(self, sampling: SamplingParams, reason: FinishReason | None) -> FinishReason | None:
        """The finish reason of the whole response, given that its last attempt ended with `reason` (None: the replica
        was lost). None: the response must be resumed.

        An attempt can be aborted after its last token was sampled and before the replica noticed the end.
        """
        if self.stopped:
            return "stop"
        if reason not in (None, "abort"):
            return reason
        if self.num_tokens and int(np.frombuffer(self._ids[-4:], np.int32)[0]) in sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_tokens >= sampling.max_tokens else None

    def generation(self, prompt_ids: np.ndarray, reason: FinishReason = "abort", interruptions: int = 0) -> Generation:
        """A copy of the response so far to `prompt_ids` ([P] int32). `reason`: abort while the draft continues."""
        made = self.token_ids, self.logprobs, self.segments
        return Generation(prompt_ids, *made, reason, interruptions, self._cached_tokens or 0, self.extra)
