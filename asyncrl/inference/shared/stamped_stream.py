"""Turns the outputs of one request, received over a connection, into chunks with exact versions."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from asyncrl.errors import GenerationError, explain
from asyncrl.inference.shared.streams import RequestStream, spans_of
from asyncrl.types import GenerationRequest, TokenChunk


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens of one request since its last output.

    Attributes:
        rid: the engine's id of the request; "" if the connection serves only this request.
        ids: [n] int32.
        logprobs: [n] float32.
        reason: stop, length or abort on the last output; None before.
        spans: (version, index of its first response token) of the whole response, on the last output, if the engine
            knows them.
        experts: [T, L, k] int16 of the whole response, on the last output, if recorded; see `TOKEN_ARRAYS`.
        error: why the engine refused the request; "" if it did not.
    """

    rid: str
    ids: np.ndarray
    logprobs: np.ndarray
    reason: str | None = None
    spans: tuple[tuple[str, int], ...] | None = None
    cached_tokens: int = 0
    error: str = ""
    experts: np.ndarray | None = None


def end_output(rid: str = "", error: str = "") -> Output:
    """The output that ends a request without a token."""
    return Output(rid, np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", error=error)


class StampedStream(RequestStream):
    """Record of one request to an engine that reports the version of each token only at the end.

    Arriving tokens get the version of the last commit, since a pause returns only after all earlier tokens have
    arrived. If a pause cannot guarantee this (`hold`), tokens are held until the end of the response, when the engine
    reports their versions. Earlier stamps are checked against that report. Tokens with recorded experts are held too:
    the experts come at the end.
    """

    package: ClassVar[str] = ""
    """The engine's name in messages."""
    no_spans: ClassVar[tuple[str, str]] = ("", "")
    """(found, do) of the error raised if the engine does not report versions."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self.rid = ""
        """The engine's id of the current attempt; it may still know the previous one."""
        self._starts: list[tuple[str, int]] = []
        """As `Output.spans`, of the tokens handed over."""
        self._held: list[Output] | None = None

    def enter(self) -> None:
        """The request goes to the engine, as a new attempt."""
        self.rid = uuid.uuid4().hex
        self._starts, self._held = [], [] if self.request.sampling.experts else None

    def hold(self) -> None:
        """A commit follows, and tokens sampled before it may still arrive."""
        self._held = self._held or []

    def drop_held(self) -> None:
        """Discards the held tokens: the engine will not report their versions."""
        self._held = None if self._held is None else []

    @property
    def num_sampled(self) -> int:
        return self.num_tokens + sum(len(output.ids) for output in self._held or ())

    def take(self, output: Output, version: int | None) -> list[TokenChunk]:
        """Returns the chunks of one output, each of one version. `version`: of the last commit.

        Raises GenerationError: the engine refused the request, or its report contradicts the stamps.
        """
        if output.error:
            raise self._failed(output.error, "look at the log of its process")
        if self._held is None:
            chunks = self._stamped(output, version)
        else:
            self._held.append(output)
            chunks = self._released(output) if output.reason is not None else []
        if output.reason is None:
            return chunks
        if output.spans is not None and self._starts and list(output.spans) != self._starts:
            found = f"stamped {self._starts}, {self.package} has {list(output.spans)}"
            raise self._failed(found, "report this: a pause returned before all tokens had arrived")
        return self.finished(chunks, version, output.reason, output.cached_tokens)

    def _stamped(self, output: Output, version: int | None) -> list[TokenChunk]:
        if not len(output.ids):
            return []
        assert version is not None, "the gate opens with the first commit"
        if not self._starts or self._starts[-1][0] != str(version):
            self._starts.append((str(version), self.num_tokens))
        return self.cut(output.ids, output.logprobs, [(version, 0, len(output.ids))])

    def _released(self, last: Output) -> list[TokenChunk]:
        assert self._held is not None
        # The held tokens leave as one piece, cut where the engine's report changes version.
        ids = np.concatenate([output.ids for output in self._held])
        logprobs = np.concatenate([output.logprobs for output in self._held])
        if not len(ids):
            return []
        extra = None
        if self.request.sampling.experts:
            if last.experts is None and last.reason == "abort":  # aborted before the engine could report them
                return []
            if last.experts is None or len(last.experts) != self.num_tokens + len(ids):
                found = f"experts of {0 if last.experts is None else len(last.experts)} tokens for {len(ids)}"
                raise self._failed(found, "report this: without them the trainer would route the tokens otherwise")
            extra = {"experts": last.experts[self.num_tokens :]}
        if last.spans is None:
            raise self._failed(*self.no_spans)
        self._starts = list(last.spans)
        return self.cut(ids, logprobs, spans_of(last.spans, self.num_tokens, len(ids)), extra)

    def _failed(self, found: str, do: str) -> GenerationError:
        return GenerationError(explain(f"generate {self.request.request_id!r} in {self.package}", found, do))
