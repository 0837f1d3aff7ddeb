"""Decides whether an engine's KV cache has room for one more request. Pure: no clock, no I/O.

An engine that runs out of KV cache takes a running request out, and computes its tokens again later. Two ways to
foresee that:

`full` reserves for each request all the tokens that it may sample. Nothing is ever taken out, but most of the cache
stays empty where responses end early.

`expected` draws a response length for each running request from the lengths of the responses that have ended, given
the tokens that it has already, and asks whether the cache would hold the requests at every moment until the last one
ends. Source: the Past-Future scheduler (Gong et al., ASPLOS 2025, arXiv:2507.10150). It differs in that each request
keeps its quantile, that running responses count among the lengths (else the short ones, which end first, would be all
that is known at a start), and that the limit of a request is always possible: without a history this is `full`.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

HISTORY = 512
"""Responses whose lengths are remembered, the latest ones."""
HEADROOM = 0.05
"""Share of the cache that `expected` leaves empty, for lengths that were drawn too short."""


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """What an engine's KV cache holds: `tokens`, in blocks of `block_tokens`, of which no two requests share a part
    of one."""

    tokens: int
    block_tokens: int


class Occupant(NamedTuple):
    """A request in the cache, or one that asks for room.

    Attributes:
        held_tokens: its prompt and the tokens sampled so far.
        response_tokens: of these, the response so far; also what a resumed request had sampled before.
        remaining_tokens: the most that it may still sample.
        prompt: the same for requests whose prompts share their blocks; None: it shares none.
        prompt_tokens: length of the prompt.
        quantile: in [0, 1): of the lengths that the response may reach.
    """

    held_tokens: int
    response_tokens: int
    remaining_tokens: int
    prompt: int | None
    prompt_tokens: int
    quantile: float


def quantile_of(request_id: str) -> float:
    """Evenly spread over [0, 1) for ids that differ; always the same for one id."""
    return zlib.crc32(request_id.encode()) / (1 << 32)


class KvRoom:
    """The room of one KV cache. Owns the lengths of the responses that have ended."""

    def __init__(self, capacity: KvCapacity, *, full: bool) -> None:
        self._capacity = capacity
        self._full = full
        self._lengths: deque[int] = deque(maxlen=HISTORY)
        self._sorted: np.ndarray | None = None
        """`_lengths`, ascending; None: to be sorted."""

    @property
    def worth_asking_again(self) -> int:
        """Tokens to be sampled before a request that had no room may have it, although no other request ended."""
        return max(1, self._capacity.tokens // 64)

    def ended(self, response_tokens: int) -> None:
        """A response of this length has ended by itself, or at its limit."""
        self._lengths.append(response_tokens)
        self._sorted = None

    def fits(self, asked: Occupant, inside: Sequence[Occupant]) -> bool:
        """Whether `asked` may join those `inside`; always into an empty cache, where no more room can come."""
        if not inside:
            return True
        occupants = [*inside, asked]
        if self._full:
            block = self._capacity.block_tokens
            # One token more than a request has is prepared while the last one is sampled.
            blocks = sum(-(-(o.held_tokens + o.remaining_tokens + 1) // block) for o in occupants)
            return blocks * block <= self._capacity.tokens
        return self.peak_tokens(occupants) <= self._capacity.tokens * (1 - HEADROOM)

    def peak_tokens(self, occupants: Sequence[Occupant]) -> int:
        """The most tokens that these requests hold at one time, if each samples one token in each step, until the
        length that is drawn for it."""
        block = self._capacity.block_tokens
        held, response, limit = np.array([o[:3] for o in occupants], np.int64).T
        remaining = self._drawn(response, limit, np.array([o.quantile for o in occupants]))
        order = np.argsort(-remaining, kind="stable")
        own, prompts = held.copy(), np.zeros_like(held)
        seen: set[int] = set()
        for i in order:  # from the one that stays longest: it pays for the prompt that it shares
            prompt, tokens = occupants[i].prompt, occupants[i].prompt_tokens
            if prompt is not None:
                shared = (tokens - 1) // block * block  # the last token of a prompt is computed for each
                own[i] -= shared
                prompts[i] = 0 if prompt in seen else shared
                seen.add(prompt)
        # When the i-th of the order ends, those before it are still there, each with as many tokens more.
        count = np.arange(1, len(occupants) + 1)
        at_ends = np.cumsum((own + prompts)[order]) + count * (remaining[order] + block)
        return int(at_ends.max())

    def _drawn(self, response: np.ndarray, limit: np.ndarray, quantile: np.ndarray) -> np.ndarray:
        """Tokens that each response still gets, between 1 and its limit."""
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._lengths, np.int64))
        lengths = self._sorted
        longer = np.sort(response)
        # Kaplan and Meier's estimate: a response that still runs has survived all lengths below its own. One more
        # than there are survives everything, so that the limit always stays possible.
        alive = len(lengths) - np.arange(len(lengths)) + len(longer) - np.searchsorted(longer, lengths, side="left") + 1
        survival = np.cumprod(1 - 1 / alive)
        shorter = np.searchsorted(lengths, response, side="right")
        now = np.append(1.0, survival)[shorter]
        drawn = np.searchsorted(-survival, -now * (1 - quantile), side="right")
        drawn = np.maximum(drawn, shorter)
        unknown = np.iinfo(np.int64).max
        length = np.append(lengths, unknown)[drawn]  # the last: longer than all so far
        return np.clip(length - response, 1, np.maximum(limit, 1))
