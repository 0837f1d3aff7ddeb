"""One request inside SGLang: turns outputs of its process into chunks with exact versions."""

from __future__ import annotations

import asyncio
import uuid

import numpy as np

from asyncrl.errors import GenerationError, explain
from asyncrl.inference.sglang.wire import Output
from asyncrl.inference.shared.streams import RequestStream, spans_of
from asyncrl.types import GenerationRequest, TokenChunk


class SglangStream(RequestStream):
    """The adapter's record of one request to SGLang.

    Tokens that arrive are of the version of the last commit: a pause returns when all earlier ones have arrived. Where
    that cannot be known (`hold`), tokens wait for the end of the response: SGLang then says which are of which version,
    and what was stamped before is held against it.
    """

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self.outputs: asyncio.Queue[Output] = asyncio.Queue()
        self.rid = ""
        """Of the present attempt in SGLang."""
        self._starts: list[tuple[str, int]] = []
        """(version, index of its first response token) of the tokens handed over."""
        self._held: list[Output] | None = None

    def enter(self) -> None:
        """The request goes to SGLang."""
        self.rid = uuid.uuid4().hex
        self._starts, self._held = [], None

    def hold(self) -> None:
        """A commit comes, and tokens from before it may still arrive."""
        self._held = self._held or []

    def take(self, output: Output, version: int | None) -> list[TokenChunk]:
        """The chunks of one output, each of one version. `version`: of the last commit.

        Raises GenerationError: SGLang refused the request, or stamps its tokens in another way.
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
            found = f"stamped {self._starts}, SGLang has {list(output.spans)}"
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
        if last.spans is None:
            found = "it was sampled under two versions, and this SGLang does not say which token under which"
            raise self._failed(found, "set rollout.interrupt=abort_resume, or install sglang>=0.5.19")
        self._starts = list(last.spans)
        return self.cut(ids, logprobs, spans_of(last.spans, self.num_tokens, len(ids)))

    def _failed(self, found: str, do: str) -> GenerationError:
        return GenerationError(explain(f"generate {self.request.request_id!r} in SGLang", found, do))
