"""Holds requests back while an engine's KV cache has no room for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from asyncrl.config.rollout import KvAdmissionMode
from asyncrl.inference.shared.kv_room import KvCapacity, KvRoom, Occupant, quantile_of
from asyncrl.inference.shared.streams import RequestStream

logger = logging.getLogger(__name__)


class KvAdmission:
    """Tells an engine's queue whether a request fits. Owns the `KvRoom` of the engine's cache. Every request fits while
    the cache size is unknown, and with mode off."""

    def __init__(self, mode: KvAdmissionMode) -> None:
        self._mode = mode
        self._shares_prompts = False
        self._room: KvRoom | None = None
        self._sampled = 0
        """Tokens sampled since a request was last checked; see `KvRoom.worth_asking_again`."""

    def learn(self, capacity: KvCapacity | None) -> None:
        """`capacity`: of the started engine; None: not reported."""
        if capacity is None and self._mode != "off":
            logger.warning("the engine does not tell the size of its KV cache: kv_admission=%s is off", self._mode)
        if capacity is not None and self._mode != "off":
            # Else not shared: in parts it may be computed twice.
            self._shares_prompts = capacity.shares_prompts and self._mode == "expected"
            self._room = KvRoom(capacity, full=self._mode == "full")

    def fits(self, stream: RequestStream, running: Sequence[RequestStream], weights: int) -> bool:
        """Whether the stream may join the running ones. `weights`: number of the current weights; only prompts computed
        with the same weights are shared."""
        if self._room is None:
            return True
        self._sampled = 0
        prompt = stream.request.prompt_ids
        stream.prompt_key = hash((weights, prompt.tobytes())) if self._shares_prompts else None
        return self._room.fits(_occupant(stream), [_occupant(other) for other in running])

    def sampled(self, num_tokens: int) -> bool:
        """Counts tokens of any stream. True: the queue should check its head again."""
        if self._room is None:
            return False
        self._sampled += num_tokens
        return self._sampled >= self._room.worth_asking_again

    def ended(self, stream: RequestStream) -> None:
        """The response ended at a stop token or its limit."""
        if self._room is not None and stream.request.sampling.score_from is None:
            self._room.ended(stream.request.first_position + stream.num_tokens)


def _occupant(stream: RequestStream) -> Occupant:
    request, sampled = stream.request, stream.num_sampled
    prompt_tokens = len(request.prompt_ids)
    limit = request.sampling.max_tokens if request.sampling.score_from is None else 1  # scoring samples one token
    return Occupant(
        prompt_tokens + sampled,
        request.first_position + sampled,
        max(1, limit - sampled),
        stream.prompt_key,
        prompt_tokens,
        quantile_of(request.request_id),
    )
