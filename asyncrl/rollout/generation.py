"""The generation client: makes one response from any number of interrupted attempts, on any replicas.

A resumed attempt keeps the tokens that had arrived, and continues with the version that its replica serves then. The
segments of the response say which version sampled which tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncrl.errors import AsyncRLError, BadRequest, DeadlineExceeded, GenerationError, ProcessDied
from asyncrl.remote.tasks import LimitedEvent
from asyncrl.rollout.active_clock import ActiveClock
from asyncrl.rollout.draft import Draft
from asyncrl.rollout.router import ANYWHERE, Affinity, Router
from asyncrl.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    ReplicaRow,
    ReplicaState,
    ReplicaTable,
    SamplingParams,
    TokenChunk,
)

__all__ = ["Draft", "GenerationClient", "OnChunk", "ReplicaChannel"]

logger = logging.getLogger(__name__)


COLLECT_S = 0.0002
"""CPU time that a collection from one replica costs this process in all its threads, tokens apart."""
COLLECT_SHARE = 0.05
"""Collections take at most this share of the process's time; beyond that they become rarer."""
COLLECT_WAIT_S = 1.0
"""Longest wait of a collection."""
GATHER_POLLS, GATHER_S = 40, 2.0
"""Tokens of a response that goes on wait at their replica for so many times the shortest interval, and as long at most,
where nobody looks at them before its end: a response has a few chunks then, however fast the engine streams. A replica
that dies loses them."""
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
class _Link:
    """The connection to one incarnation of a replica. The next incarnation under the same id is another link."""

    replica_id: int
    incarnation: int
    channel: ReplicaChannel
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    outgoing: list[GenerationRequest] = field(default_factory=list)
    in_flight: int = 0
    followed: int = 0
    """Of these, the responses whose tokens somebody looks at when they arrive."""
    leaves: bool = False
    """It gets no new request; what it has still returns its tokens."""
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it leaves and has no request any more."""
    lost: bool = False
    """Nothing that it sends counts any more."""
    died: bool = False
    """The replica's process died. Only then may a request be the cause; a late or removed replica does not count."""
    heard_at: float = 0.0
    """When tokens of any request last came from it, by the monotonic clock."""

    @property
    def takes_requests(self) -> bool:
        return not self.leaves and not self.lost


class _Expected(NamedTuple):
    """Where the tokens of a response go, and the clocks that stand still while it waits: first its own."""

    draft: Draft
    on_chunk: OnChunk | None
    clocks: tuple[ActiveClock, ...]


@dataclass(slots=True, eq=False)
class _Pending:
    """A request in flight. Its tokens go to the draft of its response. `sampled`: one has come."""

    link: _Link
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


class GenerationClient:
    """Sends requests to replicas in batches and hands the streamed tokens to the responses that they belong to. Owns
    the connections to the replicas, the router, and the tokens received so far of every pending response.

    Consumes: `generate` calls of environments.
    Produces: whole responses, whose segments carry the replica's versions.
    Waits for: chunks; one collector per replica makes long polls of 1 s, at least `poll_interval_s` apart, while the
    replica has requests of this client: for ends of responses, and all tokens every `GATHER_POLLS` intervals. Each
    response takes at most `request_timeout_s`, apart from the time in which it waits for a place at a replica that
    streams tokens of other responses; one that streams nothing for `request_timeout_s` fails those that wait there.
    Unblocked by: chunks; the loss of a replica, which ends its attempts with the tokens that had arrived.
    Stops when: `close` is called; every pending response then raises GenerationError. A collector also stops when its
    replica is lost.
    """

    def __init__(  # noqa: PLR0913 its limits and hooks have defaults
        self,
        name: str,
        replicas: ReplicaTable,
        *,
        request_timeout_s: float,
        poll_interval_s: float,
        states: tuple[ReplicaState, ...] = ("serving", "held"),
        waits_for_replacements: bool = False,
        max_lost: int = 3,
        router: Router | None = None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            name: unique among the clients of these replicas; prefix of every request id.
            replicas: the table of replicas, with a `ReplicaChannel` as the handle of each row.
            states: requests go to the replicas in these states.
            request_timeout_s: longest time for one response over all its attempts, from the first token of each.
            poll_interval_s: shortest time between two collections from one replica; `collection_interval_s` of it.
            waits_for_replacements: True connects to replicas that come later, and requests wait for one, within their
                deadline, while there is none. False makes requests fail when every replica is lost, and ends `watch`.
            max_lost: a response fails when this many replicas died while they worked on it: it may be what kills them.
            router: None takes one whose limits suit replicas that decode many requests at once.
            on_change: called when a replica gets its first request, or has ended its last one.
        """
        self._name = name
        self._states = states
        self._waits_for_replacements = waits_for_replacements
        self._max_lost = max_lost
        self._on_change = on_change
        self._busy: set[int] = set()
        self._added = asyncio.Event()
        self._last_loss = "there is no replica"
        self._links: dict[int, _Link] = {}
        self._router = Router() if router is None else router
        self._request_timeout_s = request_timeout_s
        self._poll_interval_s = poll_interval_s
        self._gather_s = min(GATHER_S, GATHER_POLLS * poll_interval_s, request_timeout_s / 4)
        self._pending: dict[str, _Pending] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._collectors: set[asyncio.Task[None]] = set()
        self._hand_overs: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reprefilled_tokens = 0
        """Tokens of prompts and responses that were sent again because of interruptions."""
        for replica_id, row in replicas.those(*states).items():
            self._link(replica_id, row)

    def set_replicas(self, table: ReplicaTable, fleet: ReplicaTable | None = None) -> None:
        """Sends requests to the replicas of this table that are in `states`, and to no others.

        The requests of a replica that left, or that is another incarnation, resume elsewhere with the tokens that had
        arrived. A replica that was leased, that leaves, or that is another client's now, is told to end them, and they
        resume with all that it has sampled (`handed_over`), if this client waits for replacements. A replica that
        serves although its connection was lost is connected again.

        Args:
            fleet: all replicas, where `table` has only those of this client.
        """
        lives_on: tuple[ReplicaState, ...] = ("leased",)
        if self._waits_for_replacements:
            lives_on = ("leased", "leaving", *self._states)
        rows = (table if fleet is None else fleet).rows
        for replica_id, link in list(self._links.items()):
            row = rows.get(replica_id)
            if row is not None and row.incarnation != link.incarnation:
                row = None
            if row is not None and row.state in self._states and replica_id in table.rows:
                continue
            if row is not None and row.state in lives_on:
                self._withdraw(link)
            else:
                self._lose(link, "it is late, it leaves, or another process takes its place")
        for replica_id, row in table.those(*self._states).items():
            if replica_id in self._links:
                self._router.put(replica_id, row.version, held=row.state == "held")
            elif self._waits_for_replacements:
                self._link(replica_id, row)

    def _link(self, replica_id: int, row: ReplicaRow) -> None:
        link = self._links[replica_id] = _Link(replica_id, row.incarnation, row.handle)
        self._added.set()
        self._router.put(replica_id, row.version, held=row.state == "held")
        collector = asyncio.create_task(self._collect(link), name=f"collect from replica {replica_id}")
        self._collectors.add(collector)
        collector.add_done_callback(self._collector_ended)

    async def handed_over(self) -> None:
        """Returns when the replicas that were leased or leave have returned what they sampled for this client, after
        `HAND_OVER_S` at the latest."""
        if self._hand_overs:
            await asyncio.wait(list(self._hand_overs))

    def _withdraw(self, link: _Link) -> None:
        """Begins to end the requests of a live replica; they resume elsewhere with all tokens that it has sampled."""
        link.leaves = True
        self._unlink(link)
        self._count(link)
        task = asyncio.create_task(self._hand_over(link), name=f"withdraw from replica {link.replica_id}")
        self._hand_overs.add(task)
        task.add_done_callback(self._hand_overs.discard)

    async def _hand_over(self, link: _Link) -> None:
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self._stop_working(link)
                await link.empty.wait()
        except TimeoutError:
            logger.warning("replica %d has not returned the tokens of its requests", link.replica_id)
            self._spawn(self._stop_working(link), f"withdraw from replica {link.replica_id}")
        finally:
            self._detach(link)

    @property
    def busy(self) -> Set[int]:
        """The replicas that have requests of this client."""
        return self._busy

    @property
    def loads(self) -> dict[int, int]:
        """Requests in flight per replica that serves."""
        return self._router.loads

    async def generate(
        self,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        *,
        session_id: str = "",
        seed: int = 0,
        affinity: Affinity = ANYWHERE,
        on_chunk: OnChunk | None = None,
        draft: Draft | None = None,
        clock: ActiveClock | None = None,
    ) -> Generation:
        """Returns the whole response, resumed as often as it was interrupted.

        Args:
            session_id: requests of one session go to one replica while it can take them.
            affinity: which replica should serve it otherwise. With `only`, the request waits for that replica as others
                wait while there is none.
            on_chunk: gets the tokens as they arrive. When it returns True the request is aborted, and the response ends
                with finish_reason "stop" and all tokens that had been sampled.
            draft: holds the tokens while they arrive, for a caller that reads them at any moment. A draft that has
                tokens already continues that response: they count against `sampling.max_tokens`. A draft that finds a
                stop text ends the response there, and the request is aborted.
            clock: of the trajectory that the response belongs to; told when the response waits and when it samples.

        Raises GenerationError: refused by the replica, no replica left, or not finished in time.
        """
        draft = Draft() if draft is None else draft
        complete = draft.complete(sampling, None) if draft.num_tokens else None
        clocks = (ActiveClock(self._request_timeout_s), *([] if clock is None else [clock]))
        interruptions = lost = 0
        try:
            while complete is None:
                request = GenerationRequest(
                    request_id=f"{self._name}-{next(self._numbers):012d}",
                    prompt_ids=np.concatenate([prompt_ids, draft.token_ids]) if draft.num_tokens else prompt_ids,
                    sampling=_remaining(sampling, draft.num_tokens),
                    seed=seed,
                    first_position=draft.num_tokens,
                    session_id=session_id,
                )
                if interruptions:
                    self.reprefilled_tokens += len(request.prompt_ids)
                began = time.time()
                attempt = await self._attempt(request, affinity, _Expected(draft, on_chunk, clocks))
                if draft.attempts is not None:
                    made = {"replica": attempt.replica_id, "tokens": draft.num_tokens - request.first_position}
                    draft.attempts.append(("request", began, time.time(), made))
                complete = "stop" if attempt.enough else draft.complete(sampling, attempt.reason)
                if complete is not None:
                    break
                # Interrupted: send the prompt and the tokens so far again, wherever the router says.
                interruptions += 1
                lost += attempt.link.died
                if lost >= self._max_lost:
                    found = f"{lost} replicas were lost while they worked on it"
                    raise GenerationError(f"a response is not tried on another replica: {found}")
        except AsyncRLError:
            raise
        except TimeoutError as e:
            raise GenerationError(f"a response was not finished within {self._request_timeout_s} s") from e
        return draft.generation(prompt_ids, complete, interruptions)

    async def score(self, token_ids: np.ndarray, score_from: int, *, session_id: str = "") -> np.ndarray:
        """[len - score_from] float32: log-probabilities of `token_ids[score_from:]`, each given the tokens before it,
        at temperature 1. Raises as `generate`."""
        return (await self.score_top(token_ids, score_from, 0, session_id=session_id)).logprobs

    async def score_top(self, token_ids: np.ndarray, score_from: int, top: int, *, session_id: str = "") -> Generation:
        """As `score`, in `logprobs` of the generation; with `top` above 0 also the likeliest tokens of each place, in
        `top_ids` and `top_logprobs` of its `extra`, [len - score_from, top] each."""
        asked = SamplingParams(score_from=score_from, score_top=top)
        scored = await self.generate(token_ids, asked, session_id=session_id)
        if not np.array_equal(scored.token_ids, token_ids[score_from:]):
            raise GenerationError(f"{len(scored.token_ids)} tokens were scored, of {len(token_ids) - score_from}")
        shapes = {scored.extra[name].shape for name in ("top_ids", "top_logprobs") if name in scored.extra}
        if top and shapes != {(len(scored.token_ids), top)}:
            raise GenerationError(
                f"{top} tokens were asked for at each of {len(scored.token_ids)} places, got {shapes}"
            )
        return scored

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    async def watch(self) -> None:
        """Runs as long as the client works. Raises the unexpected error of a collector; GenerationError when every
        replica is lost, unless the client waits for replacements."""
        await asyncio.shield(self._ended)

    async def close(self) -> None:
        for pending in self._pending.values():
            pending.failure = GenerationError("the generation client was closed")
            pending.done.set()
        tasks = [*self._collectors, *self._hand_overs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pending in self._pending.values():  # what came meanwhile
            pending.failure = GenerationError("the generation client was closed")
            pending.done.set()
        self._ended.cancel()

    async def _attempt(self, request: GenerationRequest, affinity: Affinity, expected: _Expected) -> _Pending:
        """Raises TimeoutError: the response is late, or no replica has taken the request in time."""
        if not self._may_send(affinity):
            async with asyncio.timeout(self._request_timeout_s):
                while not self._may_send(affinity):
                    if not self._waits_for_replacements:
                        raise GenerationError(self._last_loss)
                    self._added.clear()
                    await self._added.wait()
        link = self._links[self._router.pick(request.session_id, *affinity)]
        pending = self._pending[request.request_id] = _Pending(link, *expected)
        link.in_flight += 1
        link.followed += pending.followed
        self._count(link)
        for clock in pending.clocks:
            clock.wait()
        self._enqueue(link, request)
        try:
            await self._until_done(pending)
        except (asyncio.CancelledError, TimeoutError):
            await self._abandon(link, request.request_id)
            raise
        finally:
            for clock in pending.clocks:
                clock.end(sampled=pending.sampled)
            del self._pending[request.request_id]
            link.in_flight -= 1
            link.followed -= pending.followed
            self._count(link)
            if link.takes_requests:
                self._router.done(link.replica_id)
        if pending.failure is not None:
            raise pending.failure
        return pending

    def _may_send(self, affinity: Affinity) -> bool:
        return bool(self._links) if affinity.only is None else affinity.only in self._links

    async def _until_done(self, pending: _Pending) -> None:
        """Raises TimeoutError: the response is late, or its replica has streamed nothing for as long."""
        clock = pending.clocks[0]
        while not pending.done.is_set:
            look_s, late = clock.look_s(), clock.left_s <= 0
            if not pending.sampled:
                heard_at = max(pending.sent_at, pending.link.heard_at)
                quiet_s = heard_at + self._request_timeout_s - time.monotonic()
                queued_s = pending.sent_at + LONGEST_QUEUE * self._request_timeout_s - time.monotonic()
                look_s, late = max(0.0, min(look_s, quiet_s, queued_s)), late or min(quiet_s, queued_s) <= 0
            if late:
                raise TimeoutError
            await pending.done.wait(look_s)

    def _count(self, link: _Link) -> None:
        if link.leaves and not link.in_flight:
            link.empty.set()
        is_busy = link.in_flight > 0 and link.takes_requests
        if is_busy != (link.replica_id in self._busy) and self._links.get(link.replica_id, link) is link:
            (self._busy.add if is_busy else self._busy.discard)(link.replica_id)
            self._on_change()

    async def _abandon(self, link: _Link, request_id: str) -> None:
        """Aborts a request whose caller was cancelled or has enough tokens."""
        if not link.lost:
            try:
                await link.channel.abort([request_id])
            except ProcessDied as e:
                self._lose(link, str(e), died=True)
            except AsyncRLError as e:  # the answer is not needed: tokens that still arrive are dropped
                logger.warning("abort on replica %d: %s", link.replica_id, e)

    async def _stop_working(self, link: _Link) -> None:
        """Has a replica end the requests that it has of this client."""
        begun = [request_id for request_id, pending in self._pending.items() if pending.link is link]
        try:
            if begun:
                await link.channel.abort(begun)
        except AsyncRLError as e:  # they resume elsewhere in any case; the health check of the pool finds the replica
            logger.warning("abort on replica %d: %s", link.replica_id, e)

    def _enqueue(self, link: _Link, request: GenerationRequest) -> None:
        """Collects the requests of one turn of the event loop into a single call."""
        link.outgoing.append(request)
        if len(link.outgoing) == 1:
            self._spawn(self._flush(link), f"submit to replica {link.replica_id}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush(self, link: _Link) -> None:
        batch, link.outgoing = link.outgoing, []
        try:
            if link.lost:
                return  # losing it ended these attempts too
            if link.leaves:
                for pending in filter(None, (self._pending.get(request.request_id) for request in batch)):
                    pending.done.set()  # it never had them
                return
            await link.channel.submit(batch)
            link.busy.set()
        except (ProcessDied, DeadlineExceeded) as e:
            self._lose(link, str(e), died=isinstance(e, ProcessDied))
        except Exception as e:  # noqa: BLE001 - task boundary: it becomes the failure of the requests it was sending
            for request in batch:
                self._fail(request.request_id, e)

    async def _collect(self, link: _Link) -> None:
        """Collects the chunks of one replica until it is lost; idle while the replica has no request of this client."""
        loop = asyncio.get_running_loop()
        while not link.lost:
            await link.busy.wait()
            if link.in_flight == 0:
                link.busy.clear()
                continue
            started = loop.time()
            try:
                chunks = await link.channel.collect(COLLECT_WAIT_S, 0.0 if link.followed else self._gather_s)
            except (ProcessDied, DeadlineExceeded) as e:
                self._lose(link, str(e), died=isinstance(e, ProcessDied))
                return
            for chunk in chunks:
                self._deliver(chunk)
            shortest_s = self._poll_interval_s
            interval_s = shortest_s if link.leaves else collection_interval_s(shortest_s, len(self._busy))
            await asyncio.sleep(max(0.0, interval_s - (loop.time() - started)))

    def _collector_ended(self, task: asyncio.Task[None]) -> None:
        self._collectors.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._end(failure)

    def _end(self, failure: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(failure)
            self._ended.exception()  # marks it as retrieved: `watch` need not be running

    def _deliver(self, chunk: TokenChunk) -> None:
        pending = self._pending.get(chunk.request_id)
        if pending is None:
            return  # the request was abandoned
        if chunk.error is not None:
            refusal = BadRequest if chunk.bad_request else GenerationError
            self._fail(chunk.request_id, refusal(chunk.error))
            return
        if pending.link.lost:
            return  # the attempt has ended with the tokens that had arrived before
        if len(chunk.token_ids):
            pending.link.heard_at = time.monotonic()
            if not pending.sampled:
                pending.sampled = True
                for clock in pending.clocks:
                    clock.sample()
        pending.draft.add(chunk, pending.replica_id)
        if not pending.enough and len(chunk.token_ids) > 0 and _is_enough(pending, chunk):
            pending.enough = True
            if chunk.finish_reason is None:
                self._spawn(self._abandon(pending.link, chunk.request_id), f"abort of {chunk.request_id}")
        if chunk.finish_reason is not None:
            pending.reason = chunk.finish_reason
            pending.done.set()

    def _fail(self, request_id: str, failure: Exception) -> None:
        if (pending := self._pending.get(request_id)) is not None:
            pending.failure = failure
            pending.done.set()

    def _lose(self, link: _Link, reason: str, *, died: bool = False) -> None:
        """Ends the attempts on a lost replica with the tokens that had arrived; their responses resume elsewhere."""
        if link.lost:
            return
        link.died = died and not link.leaves  # it was asked to end
        logger.log(logging.INFO if link.leaves else logging.ERROR, "replica %d is lost: %s", link.replica_id, reason)
        self._detach(link)
        if not self._links:
            found = f"replica {link.replica_id} was the last: {reason}"
            self._last_loss = f"no replica is left: all of them have stopped; {found}"
            if not self._waits_for_replacements:
                self._end(GenerationError(self._last_loss))

    def _detach(self, link: _Link) -> None:
        """Ends the attempts on a replica with the tokens that have arrived."""
        link.lost = True
        self._unlink(link)
        link.busy.set()  # its collector ends
        for pending in self._pending.values():
            if pending.link is link:
                pending.done.set()

    def _unlink(self, link: _Link) -> None:
        """No new request goes to it."""
        if self._links.get(link.replica_id) is link:
            del self._links[link.replica_id]
            self._router.remove(link.replica_id)
            self._busy.discard(link.replica_id)


def _is_enough(pending: _Pending, chunk: TokenChunk) -> bool:
    """True when the response needs no more tokens than it has with this chunk."""
    asked = pending.on_chunk is not None and pending.on_chunk(chunk, pending.replica_id)
    return bool(asked) or pending.draft.stopped


def _remaining(sampling: SamplingParams, num_tokens: int) -> SamplingParams:
    """The sampling parameters of a response that already has `num_tokens` tokens."""
    if not num_tokens:
        return sampling
    max_tokens, min_tokens = sampling.max_tokens - num_tokens, max(0, sampling.min_tokens - num_tokens)
    return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)
