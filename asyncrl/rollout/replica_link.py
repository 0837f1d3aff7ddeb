"""The connection of a generation client to one replica: sends its requests in batches, and hands the tokens that
arrive to the responses that they belong to."""

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
"""CPU time that a collection from one replica costs this process in all its threads, tokens apart."""
COLLECT_SHARE = 0.05
"""Collections take at most this share of the process's time; beyond that they become rarer."""
COLLECT_WAIT_S = 1.0
"""Longest wait of a collection."""
HAND_OVER_S = 2.0
"""A live replica that takes no more requests has so long to return what it has sampled."""
LONGEST_QUEUE = 4.0
"""Times `rollout.request_timeout_s`: as long may a request wait at a replica that streams other responses."""


def collection_interval_s(shortest_s: float, num_busy: int) -> float:
    """Seconds between two collections from one replica, while `num_busy` replicas have requests. `shortest_s` for a few
    replicas; with more it grows, so that the calls of all together take a bounded share of a core."""
    return max(shortest_s, num_busy * COLLECT_S / COLLECT_SHARE)


class ReplicaChannel(Protocol):
    """The client's calls to one replica. Raises ProcessDied when the replica has died."""

    async def submit(self, requests: list[GenerationRequest]) -> None: ...

    async def collect(self, wait_s: float, gather_s: float) -> list[TokenChunk]:
        """Chunks that were not collected before: of requests that have ended as soon as there is one, of all once
        tokens have waited for `gather_s`. Waits at most `wait_s`."""
        ...

    async def abort(self, request_ids: list[str]) -> None: ...


OnChunk = Callable[[TokenChunk, int], bool | None]
"""(chunk, replica id) -> True when the caller needs no more of this response. Called in order with each chunk that has
tokens, when it arrives. Must be quick and must not raise."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request in flight. Its tokens go to the draft of its response. `clocks` stand still while it waits, first its
    own; `sampled`: a token has come; `enough`: the response needs no more tokens than it has."""

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
    def replica_id(self) -> int:
        return self.link.replica_id

    @property
    def followed(self) -> bool:
        """Its tokens decide whether it goes on."""
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
        """Adds the tokens of a chunk. True when the response needs no more than it has now, although the replica would
        go on."""
        count = len(chunk.token_ids)
        if count:
            self.link.heard_at = time.monotonic()
            if not self.sampled:
                self.sampled = True
                for clock in self.clocks:
                    clock.sample()
        self.draft.add(chunk, self.replica_id)
        was_enough = self.enough
        if count and not was_enough:
            asked = self.on_chunk is not None and self.on_chunk(chunk, self.replica_id)
            self.enough = bool(asked) or self.draft.stopped
        if chunk.finish_reason is not None:
            self.reason = chunk.finish_reason
            self.done.set()
        return self.enough and not was_enough and chunk.finish_reason is None


@dataclass(slots=True, eq=False)
class ReplicaLink:
    """The connection to one incarnation of a replica. The next incarnation under the same id is another link.

    `requests`: those in flight of the client, at all replicas. `gather_s`: tokens that nobody looks at before the end
    of their response wait at the replica for so long. `interval_s()`: seconds between two collections. `lose(link, why,
    died)`: is called when a call finds the replica gone. `spawn(work, name)`: starts a task that the client owns.
    """

    replica_id: int
    incarnation: int
    channel: ReplicaChannel
    requests: dict[str, PendingRequest]
    gather_s: float
    interval_s: Callable[[ReplicaLink], float]
    lose: Callable[[ReplicaLink, str, bool], None]
    spawn: Callable[[Coroutine[Any, Any, None], str], None]
    in_flight: int = 0
    """Requests of this link."""
    followed: int = 0
    """Of these, the responses whose tokens somebody looks at when they arrive."""
    leaves: bool = False
    """It gets no new request; what it has still returns its tokens."""
    lost: bool = False
    """Nothing that it sends counts any more."""
    died: bool = False
    """The replica's process died. Only then may a request be the cause; a late or removed replica does not count."""
    heard_at: float = 0.0
    """When tokens of any request last came from it, by the monotonic clock."""
    _submitted: asyncio.Event = field(default_factory=asyncio.Event)
    _outgoing: list[GenerationRequest] = field(default_factory=list)
    _empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it leaves and has no request any more."""

    @property
    def takes_requests(self) -> bool:
        return not self.leaves and not self.lost

    def send(self, request: GenerationRequest, pending: PendingRequest) -> None:
        """Collects the requests of one turn of the event loop into a single call."""
        self.requests[request.request_id] = pending
        self.in_flight += 1
        self.followed += pending.followed
        self._outgoing.append(request)
        if len(self._outgoing) == 1:
            self.spawn(self._flush(), f"submit to replica {self.replica_id}")

    def forget(self, request_id: str) -> None:
        """The request has ended, for whatever reason."""
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
            except AsyncRLError as e:  # the answer is not needed: tokens that still arrive are dropped
                logger.warning("abort on replica %d: %s", self.replica_id, e)

    async def collect(self) -> None:
        """Collects the chunks of the replica until it is lost; idle while it has no request of this client."""
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
        """Ends the requests of a live replica, which gets no more; they end with all tokens that it has sampled, after
        `HAND_OVER_S` at the latest."""
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
        """No new request comes; `hand_over` follows."""
        self.leaves = True
        if not self.in_flight:
            self._empty.set()

    def detach(self) -> None:
        """Ends the attempts on the replica with the tokens that have arrived."""
        self.lost = True
        self._submitted.set()  # its collector ends
        for pending in self.requests.values():
            if pending.link is self:
                pending.done.set()

    async def _flush(self) -> None:
        batch, self._outgoing = self._outgoing, []
        try:
            if self.lost:
                return  # losing it ended these attempts too
            if self.leaves:
                for pending in filter(None, (self.requests.get(request.request_id) for request in batch)):
                    pending.done.set()  # it never had them
                return
            await self.channel.submit(batch)
            self._submitted.set()
        except (ProcessDied, DeadlineExceeded) as e:
            self.lose(self, str(e), isinstance(e, ProcessDied))
        except Exception as e:  # noqa: BLE001 - task boundary: it becomes the failure of the requests it was sending
            for pending in filter(None, (self.requests.get(request.request_id) for request in batch)):
                pending.fail(e)

    async def _stop_working(self) -> None:
        """Has the replica end the requests that it has of this client."""
        begun = [request_id for request_id, pending in self.requests.items() if pending.link is self]
        try:
            if begun:
                await self.channel.abort(begun)
        except AsyncRLError as e:  # they resume elsewhere in any case; the health check of the pool finds the replica
            logger.warning("abort on replica %d: %s", self.replica_id, e)

    def _deliver(self, chunk: TokenChunk) -> None:
        pending = self.requests.get(chunk.request_id)
        if pending is None:
            return  # the request was abandoned
        if chunk.error is not None:
            refusal = BadRequest if chunk.bad_request else GenerationError
            pending.fail(refusal(chunk.error))
        elif not pending.link.lost and pending.take(chunk):  # a lost one's attempts have ended with what they had
            self.spawn(pending.link.abandon(chunk.request_id), f"abort of {chunk.request_id}")
