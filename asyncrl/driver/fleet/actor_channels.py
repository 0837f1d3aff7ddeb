"""How the rollouter and the other actors reach each other: each call has a deadline and fails with a named error."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from dataclasses import replace

from asyncrl.inference.replica import Replica
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.remote.actor_client import CALL_TIMEOUT_S, ActorClient, ActorHandle
from asyncrl.remote.waits import FOREVER_S, MESSAGE_QUEUE, ROLLOUTER, replica
from asyncrl.rollout.rollouter import Rollouter
from asyncrl.types import (
    Admission,
    EvalResult,
    GenerationRequest,
    PartialGroup,
    ReplicaRow,
    ReplicaStats,
    ReplicaTable,
    RolloutStats,
    Ticket,
    TokenChunk,
    TrajectoryGroup,
)

GRACE_S = 5.0
"""Time that the call of an evaluation has beyond the rollouter's deadline, so that the rollouter's error arrives."""
_NUMBERS = itertools.count()
"""Of the channels that this process has made: tables, and with them channels, are made by the owner of the replicas."""


class ReplicaActorChannel:
    """A `ReplicaChannel` over a Ray actor handle. `external`: its client is not part of the run. `incarnation`: as of
    `Replica.submit`. Each has an outbox of its own at the replica: a collection whose connection broke takes nothing
    that came for the next channel."""

    def __init__(
        self,
        replica_id: int,
        handle: ActorHandle,
        client_id: str,
        *,
        external: bool = False,
        incarnation: int | None = None,
    ) -> None:
        self._actor = ActorClient(handle, replica(replica_id), has_line=True)
        self._client_id = f"{client_id}/{next(_NUMBERS)}"
        self._external = external
        self._incarnation = incarnation

    async def submit(self, requests: list[GenerationRequest]) -> None:
        await self._actor.call(
            CALL_TIMEOUT_S, Replica.submit, self._client_id, requests, self._external, self._incarnation
        )

    async def collect(self, wait_s: float, gather_s: float) -> list[TokenChunk]:
        timeout_s = wait_s + CALL_TIMEOUT_S
        return await self._actor.call(timeout_s, Replica.collect, self._client_id, wait_s, gather_s)

    async def abort(self, request_ids: list[str]) -> None:
        await self._actor.call(CALL_TIMEOUT_S, Replica.abort, request_ids)

    async def stats(self, timeout_s: float) -> ReplicaStats:
        return await self._actor.call(timeout_s, Replica.stats)


def channels(table: ReplicaTable, client_id: str, *, external: bool = False) -> ReplicaTable:
    """The table with a channel of this client, in place of the control, as the handle of each replica."""

    def channel(replica_id: int, row: ReplicaRow) -> ReplicaActorChannel:
        return ReplicaActorChannel(
            replica_id, row.handle.handle, client_id, external=external, incarnation=row.incarnation
        )

    return replace(table, rows={i: replace(row, handle=channel(i, row)) for i, row in table.rows.items()})


class QueueChannel:
    """The rollout side of the message queue over its Ray actor handle.

    Puts that arrive during a call are sent together in the next call: a call costs more than a small group.
    """

    def __init__(self, handle: ActorHandle, client_id: str = "") -> None:
        self._actor = ActorClient(handle, MESSAGE_QUEUE, has_line=True)
        self._client_id = client_id
        self._waiting: list[tuple[Ticket, TrajectoryGroup, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def admit(self, limit: int, wait_s: float) -> Admission:
        return await self._actor.call(wait_s + CALL_TIMEOUT_S, MessageQueue.admit, limit, wait_s, self._client_id)

    async def put(self, ticket: Ticket, group: TrajectoryGroup) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((ticket, group, done))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name="puts")
        await done

    async def nack(self, ticket: Ticket, reason: str) -> bool:
        return await self._actor.call(CALL_TIMEOUT_S, MessageQueue.nack, ticket, reason)

    async def _send(self) -> None:
        """Sends until no put waits; every put gets its own outcome."""
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            batch = [put for put in waiting if not put[2].cancelled()]  # the others' groups were cancelled
            if not batch:
                continue
            items = [(ticket, group) for ticket, group, _ in batch]
            try:
                outcomes = await self._actor.call(CALL_TIMEOUT_S, MessageQueue.put_many, items)
            except Exception as e:  # noqa: BLE001 - task boundary: every put of the batch raises it to its caller
                outcomes = [e] * len(batch)
            for (_, _, done), outcome in zip(batch, outcomes, strict=True):
                if done.cancelled():
                    continue
                if outcome is None:
                    done.set_result(None)
                else:
                    done.set_exception(outcome)
        self._sender = None


class RolloutControl:
    """The supervisor's calls to one rollouter. `client_id`: its name among the clients of the replicas."""

    def __init__(self, handle: ActorHandle, client_id: str) -> None:
        self.handle = handle
        self._actor = ActorClient(handle, ROLLOUTER)
        self._client_id = client_id
        self._evaluations = itertools.count()

    async def start(self, timeout_s: float) -> RolloutStats:
        return await self._actor.call(timeout_s, Rollouter.start)

    async def run(self) -> None:
        """Returns when the rollouter was stopped; raises the error that ended it. The call lasts as long as the run.
        The health watch of the coordinator bounds it, through the supervisor."""
        await self._actor.call(FOREVER_S, Rollouter.run)

    async def evaluate(self, name: str, seed: int, timeout_s: float, table: ReplicaTable | None = None) -> EvalResult:
        """`table`: as of `Rollouter.evaluate`, with the controls of the replicas as its handles."""
        if table is not None:
            # Each evaluation is a client of its own, which ends with the rollouter: see `Replica.forget_client`.
            table = channels(table, f"{self._client_id}/evaluation-{next(self._evaluations)}")
        return await self._actor.call(timeout_s + GRACE_S, Rollouter.evaluate, name, seed, timeout_s, table)

    async def set_replicas(self, table: ReplicaTable, own: Collection[int] | None = None) -> None:
        """`table`: with the controls of the replicas as its handles."""
        await self._actor.call(CALL_TIMEOUT_S, Rollouter.set_replicas, channels(table, self._client_id), own)

    async def set_pool(self, key: str, table: ReplicaTable) -> None:
        """`table`: with the controls of the replicas of that pool as its handles."""
        await self._actor.call(CALL_TIMEOUT_S, Rollouter.set_pool, key, channels(table, self._client_id))

    async def partials(self, timeout_s: float) -> list[PartialGroup]:
        return await self._actor.call(timeout_s, Rollouter.partials)

    async def stats(self, timeout_s: float) -> RolloutStats:
        return await self._actor.call(timeout_s, Rollouter.stats)

    async def stop(self, timeout_s: float) -> None:
        await self._actor.call(timeout_s, Rollouter.stop)

    def kill(self) -> None:
        self._actor.kill()

    async def ended(self, timeout_s: float) -> None:
        """Returns when the killed process has exited. Raises DeadlineExceeded."""
        await self._actor.ended(timeout_s, Rollouter.stats)
