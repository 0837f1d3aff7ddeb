"""One request inside an engine that samples in other processes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from asyncrl.errors import GenerationError, explain
from asyncrl.types import FinishReason, GenerationRequest, TokenChunk

NO_VERSION = -1
"""Stamp of an empty chunk that ends a request before the first commit."""

Fate = Literal["abort", "requeue"]
"""What happens to a request taken out of the engine: it ends with the tokens so far, or is sent again."""


class Mailbox:
    """The chunk queue of one request, for one consumer. `asyncio.Queue` supports many and costs twice as much per
    token."""

    def __init__(self) -> None:
        self._items: deque[TokenChunk | GenerationError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, item: TokenChunk | GenerationError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> TokenChunk | GenerationError:
        """Returns the oldest item; one consumer at a time. A cancelled call takes nothing."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class RequestStream:
    """The adapter's record of one request; subclasses turn an engine's outputs into chunks.

    `entered` is set once the engine has the request (or has refused it), `ended` once its last chunk is in `chunks`.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.chunks = Mailbox()
        self.num_tokens = 0
        """Tokens handed over."""
        self.fate: Fate | None = None
        self.entered = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def num_sampled(self) -> int:
        """Tokens that have arrived, including tokens not yet handed over."""
        return self.num_tokens

    def cut(
        self,
        ids: np.ndarray,
        logprobs: np.ndarray,
        spans: Sequence[tuple[int, int, int]],
        extra: Mapping[str, np.ndarray] | None = None,
    ) -> list[TokenChunk]:
        """Cuts the next tokens into chunks of one version each. `spans`: from `spans_of`. `extra`: as in a
        `TokenChunk`."""
        self.num_tokens += len(ids)
        name, extra = self.request.request_id, extra or {}
        if len(spans) == 1:
            return [TokenChunk(name, ids, logprobs, spans[0][0], extra=extra)]
        return [
            TokenChunk(name, ids[a:b], logprobs[a:b], v, extra={key: rows[a:b] for key, rows in extra.items()})
            for v, a, b in spans
        ]

    def finished(
        self, chunks: list[TokenChunk], version: int | None, reason: str, cached_tokens: int
    ) -> list[TokenChunk]:
        """Marks the last chunk as the end of the response; `version` stamps an end without tokens.

        Raises GenerationError: the engine ended the request with an error.
        """
        if reason not in ("stop", "length", "abort"):
            asked = f"generate {self.request.request_id!r}"
            do = "look at the log of its process"
            raise GenerationError(explain(asked, f"the engine ended it with {reason!r}", do))
        last = chunks.pop() if chunks else empty_chunk(self.request, version)
        rid, ids, logprobs, stamp, *_ = last
        final = TokenChunk(rid, ids, logprobs, stamp, reason, cached_tokens=cached_tokens, extra=last.extra)  # type: ignore[arg-type]
        return [*chunks, final]

    def end(self, last: TokenChunk | GenerationError) -> None:
        """Puts the last item for the consumer; ignored if the stream has ended."""
        if not self.ended.is_set():
            self.ended.set()
            self.entered.set()
            self.chunks.put_nowait(last)


def empty_chunk(
    request: GenerationRequest, version: int | None, reason: FinishReason | None = None, **refusal: Any
) -> TokenChunk:
    """`refusal`: `TokenChunk.error` and `bad_request`."""
    stamp = NO_VERSION if version is None else version
    return TokenChunk(request.request_id, np.zeros(0, np.int32), np.zeros(0, np.float32), stamp, reason, **refusal)


def spans_of(starts: Sequence[tuple[str, int]], first: int, count: int) -> list[tuple[int, int, int]]:
    """Splits response tokens `[first, first + count)` where the version changes.

    Args:
        starts: (version, index of its first response token), ascending, of the whole response.

    Returns: (version, start, stop), the latter two relative to `first`.
    """
    if count and starts and starts[-1][1] <= first:  # the usual case: no publish since the last output
        return [(int(starts[-1][0]), 0, count)]
    stop = first + count
    ends = [*(index for _, index in starts[1:]), stop]
    spans: list[tuple[int, int, int]] = []
    for (label, start), end in zip(starts, ends, strict=False):  # without tokens there is no start
        a, b = max(start, first), min(end, stop)
        if a < b:
            spans.append((int(label), a - first, b - first))
    return spans
