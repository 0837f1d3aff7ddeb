"""One choice of an answer: sampled tokens in, pieces of text out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.data.incremental_decoder import IncrementalDecoder
from asyncrl.data.stop_strings import StopStrings, StopTable
from asyncrl.serving.model_text import ModelText
from asyncrl.serving.protocol import Options
from asyncrl.types import TokenChunk


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`text` of this token alone; `offset` of its text in that of the choice, in characters."""

    token_id: int
    text: str
    logprob: float
    offset: int


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `[start, end)` of a choice were sampled by the weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of choice `index` that is certain. `sampled` is empty unless log-probabilities were requested."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    sampled: tuple[SampledToken, ...]
    version: int
    replica_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of choice `index`. `text`: the rest, which was held back until now. `stop_reason`: the stop string or the
    id of the request's stop token that ended it."""

    index: int
    text: str
    finish_reason: str
    stop_reason: str | int | None
    versions: tuple[VersionSpan, ...]
    num_tokens: int
    cached_tokens: int
    interruptions: int


class Choice:
    """Follows one response. With stop strings or log-probabilities it works token by token, to know where each ends.

    Args:
        stop_token_ids: tokens that end the response; they are counted but are not part of its text.
        stops: the table of the request's stop strings; its choices share it.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: np.ndarray,
        text: ModelText,
        options: Options,
        stop_token_ids: Sequence[int],
        stops: StopTable,
    ) -> None:
        self._index = index
        self._text = text
        self._options = options
        self._stop_ids = frozenset(stop_token_ids)
        decode = text.decode if options.skip_special_tokens else text.decode_with_special_tokens
        self._decoder = IncrementalDecoder(decode, prompt_ids[-8:].tolist())
        self._stops = StopStrings(stops)
        self._spans: list[VersionSpan] = []
        self._num_tokens = 0
        self._num_characters = 0
        self._stop_reason: int | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was found: tokens that come after it are not part of the response."""
        return self._stops.found is not None

    def feed(self, chunk: TokenChunk, replica_id: int) -> Delta:
        ids = chunk.token_ids.tolist()
        step = 1 if self._options.stop or self._options.logprobs else len(ids)
        pieces: list[str] = []
        sampled: list[SampledToken] = []
        kept = 0
        while kept < len(ids) and not self.stopped:
            some = ids[kept : kept + step]
            if self._options.logprobs:
                alone = self._text.decode_with_special_tokens(some)
                sampled.append(SampledToken(some[0], alone, float(chunk.logprobs[kept]), self._num_characters))
            pieces.append(self._text_of(some))
            kept += len(some)
        self._extend(chunk.version, kept)
        return Delta(self._index, "".join(pieces), tuple(ids[:kept]), tuple(sampled), chunk.version, replica_id)

    def finish(self, reason: str, *, cached_tokens: int, interruptions: int) -> Finished:
        tail = ""
        if not self.stopped:
            tail = self._stops.feed(self._decoder.finish())
            tail += self._stops.finish()
        return Finished(
            index=self._index,
            text=tail,
            finish_reason="stop" if self.stopped else reason,
            stop_reason=self._stops.found or self._stop_reason,
            versions=tuple(self._spans),
            num_tokens=self._num_tokens,
            cached_tokens=cached_tokens,
            interruptions=interruptions,
        )

    def _text_of(self, ids: list[int]) -> str:
        self._num_tokens += len(ids)
        if ids[-1] in self._stop_ids and self._num_tokens > self._options.min_tokens:
            if ids[-1] in self._options.stop_token_ids:
                self._stop_reason = ids[-1]
            ids = ids[:-1]
        if not ids:
            return ""
        piece = self._decoder.feed(ids)
        self._num_characters += len(piece)
        return self._stops.feed(piece) if self._num_tokens > self._options.min_tokens else piece

    def _extend(self, version: int, count: int) -> None:
        if count == 0:
            return
        last = self._spans[-1] if self._spans else None
        start = last.end if last else 0
        if last is not None and last.version == version:
            self._spans[-1] = VersionSpan(version, last.start, start + count)
        else:
            self._spans.append(VersionSpan(version, start, start + count))
