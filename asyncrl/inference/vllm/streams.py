"""One request inside vLLM: turns outputs of vLLM into chunks with exact versions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from asyncrl.errors import GenerationError, explain
from asyncrl.types import FinishReason, GenerationRequest, TokenChunk

NO_VERSION = -1
"""On a chunk without tokens that ends before the first commit."""

Fate = Literal["abort", "requeue"]
"""What follows when a request is taken out of vLLM: it ends with the tokens so far, or is sent again from the start."""


class Mailbox:
    """The queue of one request, for one consumer. asyncio.Queue supports many and costs twice as much per token."""

    def __init__(self) -> None:
        self._items: deque[TokenChunk | GenerationError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, item: TokenChunk | GenerationError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> TokenChunk | GenerationError:
        """The oldest item; one consumer at a time. A cancelled call takes nothing."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class RequestStream:
    """What the adapter knows of one request.

    `entered` is set once vLLM has the request (or has refused it), `ended` once its last chunk is in `chunks`.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.chunks = Mailbox()
        self.num_tokens = 0
        self.fate: Fate | None = None
        self.entered = asyncio.Event()
        self.ended = asyncio.Event()
        self._collector: Any = None
        self._starts: Sequence[tuple[str, int]] | None = None

    @property
    def internal_id(self) -> str | None:
        """vLLM's own id of the request; None while vLLM does not have it."""
        return None if self._collector is None else self._collector.request_id

    @property
    def behind(self) -> bool:
        """True when vLLM has output for this request that is not in `chunks` yet."""
        return self._collector is not None and self._collector.output is not None

    def enter(self, collector: Any, state: Any) -> None:
        """`state`: vLLM's RequestState, which tags tokens with the version of the step that sampled them; None if the
        request has ended already, and its last output carries the tags."""
        self._collector = collector
        self._starts = None if state is None else state.weight_version_starts
        self.entered.set()

    def leave(self) -> None:
        """Undoes `enter`, so that the request can be sent again."""
        self._collector, self._starts, self.fate = None, None, None
        self.entered.clear()

    def take(self, output: Any, version: int | None) -> list[TokenChunk]:
        """The chunks of one RequestOutput (a delta), each of one version; `version` stamps an end without tokens.

        Raises GenerationError: vLLM ended the request with an error.
        """
        completion = output.outputs[0]
        ids = np.asarray(completion.token_ids, np.int32)
        logprobs = np.array(
            [
                entry[token].logprob
                for token, entry in zip(completion.token_ids, completion.logprobs or (), strict=True)
            ],
            np.float32,
        )
        starts = self._starts
        if starts is None:
            starts = [(span.version, span.start) for span in completion.weight_versions or ()]
        spans = spans_of(starts, self.num_tokens, len(ids))
        self.num_tokens += len(ids)
        if len(spans) == 1:
            chunks = [TokenChunk(self.request.request_id, ids, logprobs, spans[0][0])]
        else:
            chunks = [TokenChunk(self.request.request_id, ids[a:b], logprobs[a:b], v) for v, a, b in spans]
        if not output.finished:
            return chunks
        last = chunks.pop() if chunks else empty_chunk(self.request, version)
        reason = _finish_reason(self.request, completion.finish_reason)
        cached = output.num_cached_tokens or 0
        final = TokenChunk(last.request_id, last.token_ids, last.logprobs, last.version, reason, cached_tokens=cached)
        return [*chunks, final]

    def end(self, last: TokenChunk | GenerationError) -> None:
        """Puts the last item for the consumer; ignored when the stream has ended."""
        if not self.ended.is_set():
            self.ended.set()
            self.entered.set()
            self.chunks.put_nowait(last)


def empty_chunk(request: GenerationRequest, version: int | None, reason: FinishReason | None = None) -> TokenChunk:
    stamp = NO_VERSION if version is None else version
    return TokenChunk(request.request_id, np.zeros(0, np.int32), np.zeros(0, np.float32), stamp, reason)


def spans_of(starts: Sequence[tuple[str, int]], first: int, count: int) -> list[tuple[int, int, int]]:
    """Cuts response tokens `[first, first + count)` where the version changes.

    Args:
        starts: (version, index of its first response token), ascending: vLLM's tags of the whole response.

    Returns: (version, start, stop), the latter two relative to `first`.
    """
    if count and starts and starts[-1][1] <= first:  # nearly always: no publish since the last output
        return [(int(starts[-1][0]), 0, count)]
    stop = first + count
    ends = [*(index for _, index in starts[1:]), stop]
    spans: list[tuple[int, int, int]] = []
    for (label, start), end in zip(starts, ends, strict=False):  # without tokens there is no start
        a, b = max(start, first), min(end, stop)
        if a < b:
            spans.append((int(label), a - first, b - first))
    return spans


def _finish_reason(request: GenerationRequest, reason: str) -> FinishReason:
    if reason in ("stop", "length", "abort"):
        return reason  # type: ignore[return-value]
    raise GenerationError(
        explain(f"generate {request.request_id!r}", f"vLLM ended it with {reason!r}", "look at the log of its process")
    )
