"""The generation client: makes one response from any number of interrupted attempts, on any replicas.

A resumed attempt keeps the tokens that had arrived and continues with the current version of its replica. The segments
of the response say which version sampled which tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from asyncrl.errors import AsyncRLError, GenerationError
from asyncrl.remote.tasks import cancel, kept
from asyncrl.rollout.active_clock import ActiveClock
from asyncrl.rollout.draft import Draft
from asyncrl.rollout.replica_link import OnChunk, PendingRequest, ReplicaLink, collection_interval_s
from asyncrl.rollout.router import ANYWHERE, Affinity, Router
from asyncrl.types import (
    Generation,
    GenerationRequest,
    ReplicaRow,
    ReplicaState,
    ReplicaTable,
    SamplingParams,
)

logger = logging.getLogger(__name__)


GATHER_POLLS, GATHER_S = 40, 2.0
"""If no caller reads tokens as they arrive, the replica batches them for GATHER_POLLS polling intervals, at most
GATHER_S. A response then comes in a few chunks, however fast the engine streams. A replica that dies loses the batched
tokens."""


class GenerationClient:
    """Sends requests to replicas in batches and hands the streamed tokens to their responses. Owns the connections to
    the replicas, the router, and the tokens received so far of every pending response.

    Consumes: `generate` calls of environments.
    Produces: whole responses, whose segments carry the replica's versions.
    Waits for: chunks. One collector per replica with requests of this client makes long polls of 1 s, at least
        `poll_interval_s` apart, for ended responses, and for all tokens every `GATHER_POLLS` intervals. A response
        takes at most `request_timeout_s`, excluding its wait for a place at a replica that streams other responses. A
        replica that streams nothing for `request_timeout_s` fails the requests that wait there.
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
            poll_interval_s: shortest time between two collections from one replica; see `collection_interval_s`.
            waits_for_replacements: True connects to replicas that start later; without any replica, requests wait for
                one within their deadline. False fails all requests and ends `watch` when every replica is lost.
            max_lost: a response fails once this many replicas died while they worked on it: the response may be the
                cause.
            router: None: a `Router` with limits for replicas that decode many requests concurrently.
            on_change: called when a replica gets its first request or ends its last one.
        """
        self._name = name
        self._states = states
        self._waits_for_replacements = waits_for_replacements
        self._max_lost = max_lost
        self._on_change = on_change
        self.busy: set[int] = set()
        """The replicas that have requests of this client."""
        self._added = asyncio.Event()
        self._last_loss = "there is no replica"
        self._links: dict[int, ReplicaLink] = {}
        self._router = Router() if router is None else router
        self._request_timeout_s = request_timeout_s
        self._poll_interval_s = poll_interval_s
        self._gather_s = min(GATHER_S, GATHER_POLLS * poll_interval_s, request_timeout_s / 4)
        self._pending: dict[str, PendingRequest] = {}
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

        The requests of a replica that left, or restarted as another incarnation, resume elsewhere with the tokens that
        had arrived. If this client waits for replacements, a replica that is leased, leaves or moves to another client
        is told to end its requests; they resume with all tokens that it sampled (`handed_over`). A serving replica
        whose connection was lost is connected again.

        Args:
            fleet: all replicas, if `table` has only the replicas of this client.
        """
        lives_on: tuple[ReplicaState, ...] = ("leased",)
        if self._waits_for_replacements:
            lives_on = ("leased", "leaving", *self._states)
        rows = (table if fleet is None else fleet).rows
        # Phase 1: drop the replicas that this client may no longer use. A live one still hands over its tokens.
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
        # Phase 2: update the remaining replicas, and connect to new ones.
        for replica_id, row in table.those(*self._states).items():
            if replica_id in self._links:
                self._router.put(replica_id, row.version, held=row.state == "held")
            elif self._waits_for_replacements:
                self._link(replica_id, row)

    def _link(self, replica_id: int, row: ReplicaRow) -> None:
        link = self._links[replica_id] = ReplicaLink(
            replica_id,
            row.incarnation,
            row.handle,
            self._pending,
            self._gather_s,
            interval_s=self._interval_s,
            lose=self._lose,
            spawn=partial(kept, self._tasks),
        )
        self._added.set()
        self._router.put(replica_id, row.version, held=row.state == "held")
        collector = asyncio.create_task(link.collect(), name=f"collect from replica {replica_id}")
        self._collectors.add(collector)
        collector.add_done_callback(self._collector_ended)

    def _interval_s(self, link: ReplicaLink) -> float:
        shortest_s = self._poll_interval_s
        return shortest_s if link.leaves else collection_interval_s(shortest_s, len(self.busy))

    async def handed_over(self) -> None:
        """Returns once the replicas that were leased or leave have returned the sampled tokens of this client, after
        `HAND_OVER_S` at the latest."""
        if self._hand_overs:
            await asyncio.wait(list(self._hand_overs))

    def _withdraw(self, link: ReplicaLink) -> None:
        """Begins to end the requests of a live replica; they resume elsewhere with all tokens that it sampled."""
        link.leave()
        self._unlink(link)
        self._count(link)
        kept(self._hand_overs, link.hand_over(), f"withdraw from replica {link.replica_id}")

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
            affinity: the preferred replica otherwise. With `only`, the request waits for that replica.
            on_chunk: gets the tokens as they arrive. If it returns True the request is aborted, and the response ends
                with finish_reason "stop" and all tokens sampled so far.
            draft: holds the tokens as they arrive; the caller may read it at any moment. The response continues after
                the tokens that the draft already has, which count against `sampling.max_tokens`. A stop text found by
                the draft aborts the request and ends the response.
            clock: of the trajectory; told when the response waits and when it samples.

        Raises GenerationError: refused by the replica, no replica left, or not finished in time.
        """
        draft = Draft() if draft is None else draft
        complete = draft.complete(sampling, None) if draft.num_tokens else None
        clocks = (ActiveClock(self._request_timeout_s), *([] if clock is None else [clock]))
        new = partial(PendingRequest, draft=draft, on_chunk=on_chunk, clocks=clocks)
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
                attempt = await self._attempt(request, affinity, new)
                if draft.attempts is not None:
                    made = {"replica": attempt.link.replica_id, "tokens": draft.num_tokens - request.first_position}
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

    async def score(self, token_ids: np.ndarray, score_from: int, top: int = 0, *, session_id: str = "") -> Generation:
        """The log-probabilities of `token_ids[score_from:]`, each given the tokens before it, at temperature 1, as
        `logprobs`, [len - score_from] float32. With `top` above 0 `extra` has the likeliest tokens of each place in
        `top_ids` and `top_logprobs`, [len - score_from, top] each. Raises as `generate`."""
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
        self._fail_all()
        await cancel(*self._collectors, *self._hand_overs)
        self._fail_all()  # requests that were added during it
        self._ended.cancel()

    def _fail_all(self) -> None:
        for pending in self._pending.values():
            pending.fail(GenerationError("the generation client was closed"))

    async def _attempt(
        self, request: GenerationRequest, affinity: Affinity, new: Callable[[ReplicaLink], PendingRequest]
    ) -> PendingRequest:
        """Raises TimeoutError: the response is late, or no replica has taken the request in time."""
        # Phase 1: wait for a replica. `_added` is set whenever one is connected.
        if not self._may_send(affinity):
            async with asyncio.timeout(self._request_timeout_s):
                while not self._may_send(affinity):
                    if not self._waits_for_replacements:
                        raise GenerationError(self._last_loss)
                    self._added.clear()
                    await self._added.wait()
        # Phase 2: send, and wait for the end of the attempt.
        link = self._links[self._router.pick(request.session_id, *affinity)]
        pending = new(link)
        for clock in pending.clocks:
            clock.wait()
        link.send(request, pending)
        self._count(link)
        try:
            await pending.until_done(self._request_timeout_s)
        except (asyncio.CancelledError, TimeoutError):
            await link.abandon(request.request_id)
            raise
        finally:
            for clock in pending.clocks:
                clock.end(sampled=pending.sampled)
            link.forget(request.request_id)
            self._count(link)
            if link.takes_requests:
                self._router.done(link.replica_id)
        if pending.failure is not None:
            raise pending.failure
        return pending

    def _may_send(self, affinity: Affinity) -> bool:
        return bool(self._links) if affinity.only is None else affinity.only in self._links

    def _count(self, link: ReplicaLink) -> None:
        is_busy = link.in_flight > 0 and link.takes_requests
        if is_busy != (link.replica_id in self.busy) and self._links.get(link.replica_id, link) is link:
            (self.busy.add if is_busy else self.busy.discard)(link.replica_id)
            self._on_change()

    def _collector_ended(self, task: asyncio.Task[None]) -> None:
        self._collectors.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._end(failure)

    def _end(self, failure: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(failure)
            self._ended.exception()  # marks it as retrieved: `watch` need not be running

    def _lose(self, link: ReplicaLink, reason: str, died: bool = False) -> None:
        """Ends the attempts on a lost replica with the tokens that had arrived; their responses resume elsewhere."""
        if link.lost:
            return
        link.died = died and not link.leaves  # a leaving replica was asked to exit
        logger.log(logging.INFO if link.leaves else logging.ERROR, "replica %d is lost: %s", link.replica_id, reason)
        self._unlink(link)
        link.detach()
        if not self._links:
            found = f"replica {link.replica_id} was the last: {reason}"
            self._last_loss = f"no replica is left: all of them have stopped; {found}"
            if not self._waits_for_replacements:
                self._end(GenerationError(self._last_loss))

    def _unlink(self, link: ReplicaLink) -> None:
        """Excludes the replica from new requests."""
        if self._links.get(link.replica_id) is link:
            del self._links[link.replica_id]
            self._router.remove(link.replica_id)
            self.busy.discard(link.replica_id)


def _remaining(sampling: SamplingParams, num_tokens: int) -> SamplingParams:
    """The sampling parameters of a response that already has `num_tokens` tokens."""
    if not num_tokens:
        return sampling
    max_tokens, min_tokens = sampling.max_tokens - num_tokens, max(0, sampling.min_tokens - num_tokens)
    return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)
