"""One request inside an engine that answers over a connection: turns its outputs into chunks with exact versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from asyncrl.errors import GenerationError, explain
from asyncrl.inference.shared.streams import RequestStream, spans_of
from asyncrl.types import GenerationRequest, TokenChunk


@dataclass(frozen=True, slots=True)
class Output:
    """What an engine has sampled of one request since the last output.

    Attributes:
        rid: the engine's own id of the request; "" where the connection belongs to one request.
        ids: [n] int32.
        logprobs: [n] float32.
        reason: stop, length or abort on the last output; None before.
        spans: (version, index of its first response token) of the whole response, on the last output of an engine that
            knows them.
        experts: [T, L, k] int16 of the whole response, on the last output of an engine that recorded them; see
            `TOKEN_ARRAYS`.
        error: why the engine ended the request, if it refused it.
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
    """The adapter's record of one request to an engine that says at the end which tokens are of which version.

    Tokens that arrive are of the version of the last commit: a pause returns when all earlier ones have arrived. Where
    that cannot be known (`hold`), tokens wait for the end of the response: the engine then says which are of which
    version, and what was stamped before is held against it. So do the tokens of a request whose experts are recorded:
    these come at the end.
    """

    package: ClassVar[str] = ""
    """The engine's name in messages."""
    no_spans: ClassVar[tuple[str, str]] = ("", "")
    """What is found, and what to do, where the engine does not say which token is of which version."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self._starts: list[tuple[str, int]] = []
        """(version, index of its first response token) of the tokens handed over."""
        self._held: list[Output] | None = None

    def enter(self) -> None:
        """The request goes to the engine."""
        self._starts, self._held = [], [] if self.request.sampling.experts else None

    def hold(self) -> None:
        """A commit comes, and tokens from before it may still arrive."""
        self._held = self._held or []

    def drop_held(self) -> None:
        """The engine will not say of which versions the held tokens are: they count as never sampled."""
        self._held = None if self._held is None else []

    @property
    def num_sampled(self) -> int:
        return self.num_tokens + sum(len(output.ids) for output in self._held or ())

    def take(self, output: Output, version: int | None) -> list[TokenChunk]:
        """The chunks of one output, each of one version. `version`: of the last commit.

        Raises GenerationError: the engine refused the request, or stamps its tokens in another way.
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
        ids = np.concatenate([output.ids for output in self._held])
        logprobs = np.concatenate([output.logprobs for output in self._held])
        if not len(ids):
            return []
        extra = None
        if self.request.sampling.experts:
            if last.experts is None and last.reason == "abort":  # the engine had no time to say them
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
