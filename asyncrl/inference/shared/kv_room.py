"""Decides whether an engine's KV cache has room for one more request. Pure: no clock, no I/O.

An engine that runs out of KV cache preempts a running request and recomputes its tokens later. Two modes predict this:

`full` reserves the maximum length of each request. Nothing is ever preempted, but most of the cache stays empty if
responses end early.

`expected` draws a final length for each running request from the lengths of past responses, conditional on its tokens
so far, and checks that the cache holds all requests at every moment until the last one ends. Source: the Past-Future
scheduler (Gong et al., ASPLOS 2025, arXiv:2507.10150). Differences: each request keeps its quantile; running responses
count as censored observations (else only the short ones, which end first, would be known at the start); and the maximum
length is always possible, so that `expected` without a history equals `full`.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

HISTORY = 512
"""Number of latest responses whose lengths are remembered."""
HEADROOM = 0.05
"""Fraction of the cache that `expected` leaves empty, for lengths drawn too short."""


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """Size of an engine's KV cache: `tokens`, in blocks of `block_tokens`. A partly filled block belongs to one
    request. `shares_prompts`: requests with equal prompts and weights share the blocks of the prompt."""

    tokens: int
    block_tokens: int
    shares_prompts: bool = True


class Occupant(NamedTuple):
    """A request that is in the cache or asks for room.

    Attributes:
        held_tokens: its prompt and the tokens sampled so far.
        response_tokens: the response part of `held_tokens`, including tokens sampled before a resume.
        remaining_tokens: maximum that it may still sample.
        prompt: equal for requests that share the prompt's blocks; None: not shared.
        prompt_tokens: length of the prompt.
        quantile: in [0, 1), selects the drawn length.
    """

    held_tokens: int
    response_tokens: int
    remaining_tokens: int
    prompt: int | None
    prompt_tokens: int
    quantile: float


def quantile_of(request_id: str) -> float:
    """A hash of the id, uniform over [0, 1)."""
    return zlib.crc32(request_id.encode()) / (1 << 32)


class KvRoom:
    """The room of one KV cache. Owns the lengths of ended responses."""

    def __init__(self, capacity: KvCapacity, *, full: bool) -> None:
        self._capacity = capacity
        self._full = full
        self.worth_asking_again = max(1, capacity.tokens // 64)
        """Tokens to sample before a refused request is worth another check although no request ended."""
        self._lengths: deque[int] = deque(maxlen=HISTORY)
        self._sorted: np.ndarray | None = None
        """`_lengths`, ascending; None: outdated."""

    def ended(self, response_tokens: int) -> None:
        """Records the length of a response that ended at a stop token or its limit."""
        self._lengths.append(response_tokens)
        self._sorted = None

    def fits(self, asked: Occupant, inside: Sequence[Occupant]) -> bool:
        """Whether `asked` may join the requests `inside`. Always true for an empty cache, which cannot get emptier."""
        if not inside:
            return True
        occupants = [*inside, asked]
        if self._full:
            block = self._capacity.block_tokens
            # The engine allocates one token ahead while it samples the last.
            blocks = sum(-(-(o.held_tokens + o.remaining_tokens + 1) // block) for o in occupants)
            return blocks * block <= self._capacity.tokens
        return self.peak_tokens(occupants) <= self._capacity.tokens * (1 - HEADROOM)

    def peak_tokens(self, occupants: Sequence[Occupant]) -> int:
        """Peak of the tokens held together, if each request samples one token per step until its drawn length."""
        block = self._capacity.block_tokens
        held, response, limit = np.array([o[:3] for o in occupants], np.int64).T
        remaining = self._drawn(response, limit, np.array([o.quantile for o in occupants]))
        order = np.argsort(-remaining, kind="stable")
        own, prompts = held.copy(), np.zeros_like(held)
        seen: set[int] = set()
        for i in order:  # the request that stays longest pays for a shared prompt
            prompt, tokens = occupants[i].prompt, occupants[i].prompt_tokens
            if prompt is not None:
                shared = (tokens - 1) // block * block  # each request computes the prompt's last token itself
                own[i] -= shared
                prompts[i] = 0 if prompt in seen else shared
                seen.add(prompt)
        # When request order[i] ends, requests order[:i] are still running and have grown by as many tokens.
        count = np.arange(1, len(occupants) + 1)
        at_ends = np.cumsum((own + prompts)[order]) + count * (remaining[order] + block)
        return int(at_ends.max())

    def _drawn(self, response: np.ndarray, limit: np.ndarray, quantile: np.ndarray) -> np.ndarray:
        """Tokens that each response will still sample, from 1 to its limit."""
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._lengths, np.int64))
        lengths = self._sorted
        longer = np.sort(response)
        # Kaplan-Meier estimate: a running response has survived all shorter lengths. One pseudo-response survives
        # everything, so that the limit is always possible.
        alive = len(lengths) - np.arange(len(lengths)) + len(longer) - np.searchsorted(longer, lengths, side="left") + 1
        survival = np.cumprod(1 - 1 / alive)
        shorter = np.searchsorted(lengths, response, side="right")
        now = np.append(1.0, survival)[shorter]
        drawn = np.searchsorted(-survival, -now * (1 - quantile), side="right")
        drawn = np.maximum(drawn, shorter)
        unknown = np.iinfo(np.int64).max
        length = np.append(lengths, unknown)[drawn]  # the appended entry means longer than all so far
        return np.clip(length - response, 1, np.maximum(limit, 1))
