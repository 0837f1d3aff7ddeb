"""One choice of an answer: sampled tokens in, pieces of text out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.data.call_splitter import CallFormat, Part, ReplySplitter, joined_parts
from asyncrl.data.incremental_decoder import Decode, IncrementalDecoder
from asyncrl.data.rows import Thinking
from asyncrl.data.stop_strings import StopStrings, StopTable
from asyncrl.serving.model_text import ModelText
from asyncrl.serving.protocol import Options
from asyncrl.types import TokenChunk


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`text` of this token alone; `offset` of its text in the choice, in characters."""

    text: str
    logprob: float
    offset: int


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The weights of `version` sampled output tokens `[start, end)` of a choice."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Final text, thoughts and tool calls of choice `index`. `sampled` is empty unless log-probabilities were
    requested."""

    index: int
    parts: tuple[Part, ...]
    token_ids: tuple[int, ...]
    sampled: tuple[SampledToken, ...]
    version: int
    replica_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of choice `index`. `parts`: the text and calls held back until now. `finish_reason`: stop, length, or
    tool_calls. `stop_reason`: the stop string or requested stop token id that ended it."""

    index: int
    parts: tuple[Part, ...]
    finish_reason: str
    stop_reason: str | int | None
    versions: tuple[VersionSpan, ...]
    num_tokens: int
    cached_tokens: int
    interruptions: int


class ChoiceForm:
    """The shared state of a request's choices, built once since it is slow with many tools.

    Attributes:
        stops: the table of the request's stop strings.
        calls: how a response may call tools; None: text only.
        thinking: marks of thoughts; None: thoughts are text.
        decode: token ids to text, without special tokens unless the request shows them, or calls or thoughts are
            written with them.
    """

    def __init__(
        self, text: ModelText, options: Options, calls: CallFormat | None, thinking: Thinking | None = None
    ) -> None:
        self.options = options
        self.stops = StopTable(options.stop)
        self.calls = calls
        self.thinking = thinking
        marks = () if self.thinking is None else (self.thinking.opening, self.thinking.closing)
        hidden = options.skip_special_tokens and not text.hides((*marks, *(() if calls is None else calls.marks)))
        self.decode: Decode = text.decode if hidden else text.decode_with_special_tokens


class Choice:
    """Follows one response, token by token if stop strings, log-probabilities or a single call require exact ends.

    Args:
        stop_token_ids: tokens that end the response; counted, but not part of its text.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: np.ndarray,
        text: ModelText,
        form: ChoiceForm,
        stop_token_ids: Sequence[int],
    ) -> None:
        options, calls = form.options, form.calls
        self._index = index
        self._text = text
        self._options = options
        self._stop_ids = frozenset(stop_token_ids)
        self._splitter = ReplySplitter(form.thinking, calls)
        self._by_token = bool(options.stop or options.logprobs or (calls is not None and calls.single))
        self._decoder = IncrementalDecoder(form.decode, prompt_ids[-8:].tolist())
        self._stops = StopStrings(form.stops)
        self._spans: list[VersionSpan] = []
        self._num_tokens = 0
        self._num_characters = 0
        self._stop_reason: int | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was found, or the only call is complete: further tokens are not part of the response."""
        return self._stops.found is not None or self._splitter.done

    def feed(self, chunk: TokenChunk, replica_id: int) -> Delta:
        ids = chunk.token_ids.tolist()
        step = 1 if self._by_token else len(ids)
        parts: list[Part] = []
        sampled: list[SampledToken] = []
        kept = 0
        while kept < len(ids) and not self.stopped:
            some = ids[kept : kept + step]
            if self._options.logprobs:
                alone = self._text.decode_with_special_tokens(some)
                sampled.append(SampledToken(alone, float(chunk.logprobs[kept]), self._num_characters))
            parts += self._splitter.feed(self._text_of(some))
            kept += len(some)
        # Tokens after the end of the response were sampled, but do not count.
        self._extend(chunk.version, kept)
        return Delta(self._index, joined_parts(parts), tuple(ids[:kept]), tuple(sampled), chunk.version, replica_id)

    def finish(self, reason: str, *, cached_tokens: int, interruptions: int) -> Finished:
        # Text that might have begun a stop string is released only now.
        tail = ""
        if not self.stopped:
            tail = self._stops.feed(self._decoder.finish())
            tail += self._stops.finish()
        reason = "stop" if self.stopped else reason
        parts = joined_parts([*self._splitter.feed(tail), *self._splitter.finish()])
        called = self._splitter.num_calls > 0
        return Finished(
            index=self._index,
            parts=parts,
            finish_reason="tool_calls" if called and reason == "stop" else reason,
            stop_reason=self._stops.found or self._stop_reason,
            versions=tuple(self._spans),
            num_tokens=self._num_tokens,
            cached_tokens=cached_tokens,
            interruptions=interruptions,
        )

    def _text_of(self, ids: list[int]) -> str:
        # A stop token counts as a token but has no text; below min_tokens it is text like any other.
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
