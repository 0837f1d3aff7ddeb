"""The connection of a generation client to one replica: sends its requests in batches, and hands arriving tokens to
their responses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError, BadRequest, DeadlineExceeded, GenerationError, ProcessDied
from asyncrl.remote.tasks import LimitedEvent
from asyncrl.rollout.active_clock import ActiveClock
from asyncrl.rollout.draft import Draft
from asyncrl.types import FinishReason, GenerationRequest, TokenChunk

logger = logging.getLogger(__name__)

COLLECT_S = 0.0002
"""CPU time of one collection from a replica in all threads of this process, without the handling of tokens."""
COLLECT_SHARE = 0.05
"""Collections take at most this share of the process's time; beyond that they become rarer."""
COLLECT_WAIT_S = 1.0
"""Longest wait of a collection."""
HAND_OVER_S = 2.0
"""How long a live replica that takes no more requests has to return its sampled tokens."""
LONGEST_QUEUE = 4.0
"""Longest wait of a request at a replica that streams other responses, in multiples of `rollout.request_timeout_s`."""


def collection_interval_s(shortest_s: float, num_busy: int) -> float:
    """Seconds between two collections from one replica, while `num_busy` replicas have requests. `shortest_s` for a few
    replicas; grows with more, so that all collections together take a bounded share of a core."""
    return max(shortest_s, num_busy * COLLECT_S / COLLECT_SHARE)


class ReplicaChannel(Protocol):
    """The client's calls to one replica. Raises ProcessDied when the replica has died."""

    async def submit(self, requests: list[GenerationRequest]) -> None: ...

    async def collect(self, wait_s: float, gather_s: float) -> list[TokenChunk]:
        """New chunks: of an ended request immediately, of all requests once tokens have waited for `gather_s`. Waits at
        most `wait_s`."""
        ...

    async def abort(self, request_ids: list[str]) -> None: ...


OnChunk = Callable[[TokenChunk, int], bool | None]
"""(chunk, replica id) -> True when the caller needs no more of this response. Called in order, on arrival of each chunk
with tokens. Must be quick and must not raise."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request in flight. Its tokens go to the draft of its response. `clocks` (its own first) stand still while it
    waits. `sampled`: a token has arrived. `enough`: the response needs no more tokens."""

    link: ReplicaLink
    draft: Draft
    on_chunk: OnChunk | None
    clocks: tuple[ActiveClock, ...]
    sent_at: float = field(default_factory=time.monotonic)
    sampled: bool = False
    done: LimitedEvent = field(default_factory=LimitedEvent)
    reason: FinishReason | None = None
    failure: Exception | None = None
    enough: bool = False

    @property
    def followed(self) -> bool:
        """The caller reads tokens as they arrive, to decide whether the response continues."""
        return self.on_chunk is not None or self.draft.looks_for_stop

    def fail(self, failure: Exception) -> None:
        self.failure = failure
        self.done.set()

    async def until_done(self, timeout_s: float) -> None:
        """Raises TimeoutError: the response is late, or its replica has streamed nothing for `timeout_s`."""
        clock = self.clocks[0]
        while not self.done.is_set:
            look_s, late = clock.look_s(), clock.left_s <= 0
            if not self.sampled:
                heard_at = max(self.sent_at, self.link.heard_at)
                quiet_s = heard_at + timeout_s - time.monotonic()
                queued_s = self.sent_at + LONGEST_QUEUE * timeout_s - time.monotonic()
                look_s, late = max(0.0, min(look_s, quiet_s, queued_s)), late or min(quiet_s, queued_s) <= 0
            if late:
                raise TimeoutError
            await self.done.wait(look_s)

    def take(self, chunk: TokenChunk) -> bool:
        """Adds the tokens of a chunk. True when the response is complete although the replica would continue."""
        count = len(chunk.token_ids)
        if count:
            self.link.heard_at = time.monotonic()
            if not self.sampled:
                self.sampled = True
                for clock in self.clocks:
                    clock.sample()
        self.draft.add(chunk, self.link.replica_id)
        was_enough = self.enough
        if count and not was_enough:
            asked = self.on_chunk is not None and self.on_chunk(chunk, self.link.replica_id)
            self.enough = bool(asked) or self.draft.stopped
        if chunk.finish_reason is not None:
            self.reason = chunk.finish_reason
            self.done.set()
        return self.enough and not was_enough and chunk.finish_reason is None


@dataclass(slots=True, eq=False)
class ReplicaLink:
    """The connection to one incarnation of a replica. The next incarnation with the same id gets another link.

    `requests`: all requests in flight of the client, at all replicas. `gather_s`: how long the replica batches tokens
    that no caller reads as they arrive. `interval_s()`: seconds between two collections. `lose(link, why, died)`:
    called when a call finds the replica gone. `spawn(work, name)`: starts a task that the client owns.
    """

    replica_id: int
    incarnation: int
    channel: ReplicaChannel
    requests: dict[str, PendingRequest]
    gather_s: float
    interval_s: Callable[[ReplicaLink], float]
    lose: Callable[[ReplicaLink, str, bool], None]
    spawn: Callable[[Coroutine[Any, Any, None], str], object]
    in_flight: int = 0
    """Requests of this link."""
    followed: int = 0
    """How many of the requests in flight have a caller that reads tokens as they arrive."""
    leaves: bool = False
    """The replica gets no new request; its remaining requests still return tokens."""
    lost: bool = False
    """Anything that the replica still sends is dropped."""
    died: bool = False
    """The replica's process died. Only then may a request be the cause."""
    heard_at: float = 0.0
    """When tokens of any request last arrived, by the monotonic clock."""
    _submitted: asyncio.Event = field(default_factory=asyncio.Event)
    _outgoing: list[GenerationRequest] = field(default_factory=list)
    _empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the link leaves and has no requests."""

    @property
    def takes_requests(self) -> bool:
        return not self.leaves and not self.lost

    def send(self, request: GenerationRequest, pending: PendingRequest) -> None:
        """Sends the request together with all others of this turn of the event loop, in one call."""
        self.requests[request.request_id] = pending
        self.in_flight += 1
        self.followed += pending.followed
        self._outgoing.append(request)
        if len(self._outgoing) == 1:
            self.spawn(self._flush(), f"submit to replica {self.replica_id}")

    def forget(self, request_id: str) -> None:
        """Removes an ended request."""
        pending = self.requests.pop(request_id)
        self.in_flight -= 1
        self.followed -= pending.followed
        if self.leaves and not self.in_flight:
            self._empty.set()

    async def abandon(self, request_id: str) -> None:
        """Aborts a request whose caller was cancelled or has enough tokens."""
        if not self.lost:
            try:
                await self.channel.abort([request_id])
            except ProcessDied as e:
                self.lose(self, str(e), True)
            except AsyncRLError as e:  # best effort: tokens that still arrive are dropped
                logger.warning("abort on replica %d: %s", self.replica_id, e)

    async def collect(self) -> None:
        """Collects chunks until the replica is lost; idle while it has no request of this client."""
        loop = asyncio.get_running_loop()
        while not self.lost:
            await self._submitted.wait()
            if self.in_flight == 0:
                self._submitted.clear()
                continue
            started = loop.time()
            try:
                chunks = await self.channel.collect(COLLECT_WAIT_S, 0.0 if self.followed else self.gather_s)
            except (ProcessDied, DeadlineExceeded) as e:
                self.lose(self, str(e), isinstance(e, ProcessDied))
                return
            for chunk in chunks:
                self._deliver(chunk)
            await asyncio.sleep(max(0.0, self.interval_s(self) - (loop.time() - started)))

    async def hand_over(self) -> None:
        """Ends the requests of a live replica that takes no more; they return all sampled tokens, after `HAND_OVER_S`
        at the latest."""
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self._stop_working()
                await self._empty.wait()
        except TimeoutError:
            logger.warning("replica %d has not returned the tokens of its requests", self.replica_id)
            self.spawn(self._stop_working(), f"withdraw from replica {self.replica_id}")
        finally:
            self.detach()

    def leave(self) -> None:
        """Stops new requests; `hand_over` follows."""
        self.leaves = True
        if not self.in_flight:
            self._empty.set()

    def detach(self) -> None:
        """Ends the attempts on the replica with the tokens that have arrived."""
        self.lost = True
        self._submitted.set()  # wakes the collector, which then exits
        for pending in self.requests.values():
            if pending.link is self:
                pending.done.set()

    async def _flush(self) -> None:
        batch, self._outgoing = self._outgoing, []
        try:
            if self.lost:
                return  # `detach` ended these attempts
            if self.leaves:
                for pending in filter(None, (self.requests.get(request.request_id) for request in batch)):
                    pending.done.set()  # the replica never received the request
                return
            await self.channel.submit(batch)
            self._submitted.set()
        except (ProcessDied, DeadlineExceeded) as e:
            self.lose(self, str(e), isinstance(e, ProcessDied))
        except Exception as e:  # noqa: BLE001 - task boundary: fails the requests of this batch
            for pending in filter(None, (self.requests.get(request.request_id) for request in batch)):
                pending.fail(e)

    async def _stop_working(self) -> None:
        """Aborts this client's requests at the replica."""
        begun = [request_id for request_id, pending in self.requests.items() if pending.link is self]
        try:
            if begun:
                await self.channel.abort(begun)
        except AsyncRLError as e:  # the requests resume elsewhere anyway; the pool's health check finds the replica
            logger.warning("abort on replica %d: %s", self.replica_id, e)

    def _deliver(self, chunk: TokenChunk) -> None:
        pending = self.requests.get(chunk.request_id)
        if pending is None:
            return  # the request was abandoned
        if chunk.error is not None:
            refusal = BadRequest if chunk.bad_request else GenerationError
            pending.fail(refusal(chunk.error))
        elif not pending.link.lost and pending.take(chunk):  # attempts on a lost replica have already ended
            self.spawn(pending.link.abandon(chunk.request_id), f"abort of {chunk.request_id}")
