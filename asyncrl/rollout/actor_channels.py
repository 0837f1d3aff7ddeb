"""How the rollouter and the other actors reach each other: each call has a deadline and fails with a named error."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import ray

from asyncrl.remote.reply import ended, reply
from asyncrl.remote.waits import FOREVER_S, MESSAGE_QUEUE, ROLLOUTER, replica
from asyncrl.types import (
    Admission,
    EvalResult,
    GenerationRequest,
    PartialGroup,
    ReplicaTable,
    RolloutStats,
    Ticket,
    TokenChunk,
    TrajectoryGroup,
)

CALL_TIMEOUT_S = 60.0
"""Longest that a call that does not wait by contract may take; a long poll gets its own wait on top."""
GRACE_S = 5.0
"""What an evaluation may take beyond the deadline that the rollouter itself keeps, so that its own error arrives."""


class ReplicaActorChannel:
    """A `ReplicaChannel` over a Ray actor handle."""

    def __init__(self, replica_id: int, handle: Any, client_id: str) -> None:
        self._handle = handle
        self._client_id = client_id
        self._process = replica(replica_id)

    async def submit(self, requests: list[GenerationRequest]) -> None:
        call = self._handle.submit.remote(self._client_id, requests)
        await reply(call, timeout_s=CALL_TIMEOUT_S, call="submit", process=self._process)

    async def collect(self, wait_s: float) -> list[TokenChunk]:
        call = self._handle.collect.remote(self._client_id, wait_s)
        return await reply(call, timeout_s=wait_s + CALL_TIMEOUT_S, call="collect", process=self._process)

    async def abort(self, request_ids: list[str]) -> None:
        await reply(
            self._handle.abort.remote(request_ids), timeout_s=CALL_TIMEOUT_S, call="abort", process=self._process
        )


def channels(table: ReplicaTable, client_id: str) -> ReplicaTable:
    """A table of controls as one of the channels of this client."""
    rows = {i: replace(r, handle=ReplicaActorChannel(i, r.handle.handle, client_id)) for i, r in table.rows.items()}
    return replace(table, rows=rows)


class QueueChannel:
    """The rollout side of the message queue over its Ray actor handle.

    Puts that come while one call is under way travel together in the next: a call costs more than a small group.
    """

    def __init__(self, handle: Any, client_id: str = "") -> None:
        self._handle = handle
        self._client_id = client_id
        self._waiting: list[tuple[Ticket, TrajectoryGroup, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def admit(self, limit: int, wait_s: float) -> Admission:
        call = self._handle.admit.remote(limit, wait_s, self._client_id)
        return await reply(call, timeout_s=wait_s + CALL_TIMEOUT_S, call="admit", process=MESSAGE_QUEUE)

    async def put(self, ticket: Ticket, group: TrajectoryGroup) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((ticket, group, done))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name="puts")
        await done

    async def nack(self, ticket: Ticket, reason: str) -> bool:
        call = self._handle.nack.remote(ticket, reason)
        return await reply(call, timeout_s=CALL_TIMEOUT_S, call=f"nack(group {ticket.ordinal})", process=MESSAGE_QUEUE)

    async def _send(self) -> None:
        """Sends until nothing waits; every put learns its own outcome."""
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            batch = [put for put in waiting if not put[2].cancelled()]  # others are of groups that were given up
            if not batch:
                continue
            put = f"put({len(batch)} groups)"
            try:
                call = self._handle.put_many.remote([(ticket, group) for ticket, group, _ in batch])
                outcomes = await reply(call, timeout_s=CALL_TIMEOUT_S, call=put, process=MESSAGE_QUEUE)
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
    """One rollouter over its Ray actor handle; `client_id` is its name among the clients of the replicas."""

    def __init__(self, handle: Any, client_id: str) -> None:
        self.handle = handle
        self._client_id = client_id
        self._evaluations = itertools.count()

    async def start(self, timeout_s: float) -> RolloutStats:
        return await reply(self.handle.start.remote(), timeout_s=timeout_s, call="start", process=ROLLOUTER)

    async def run(self) -> None:
        """Returns when the rollouter was stopped; raises what ended it. Waits as long as the run lasts: the health
        watch of the coordinator, through the supervisor, is its deadline."""
        await reply(self.handle.run.remote(), timeout_s=FOREVER_S, call="run", process=ROLLOUTER)

    async def evaluate(self, name: str, seed: int, timeout_s: float, leased: ReplicaTable | None = None) -> EvalResult:
        """`leased`: the replicas that answer all of it, None: those that serve."""
        if leased is not None:
            # Each evaluation is a client of its own, which ends with the rollouter: see `Replica.forget_client`.
            leased = channels(leased, f"{self._client_id}/evaluation-{next(self._evaluations)}")
        call = self.handle.evaluate.remote(name, seed, timeout_s, leased)
        return await reply(call, timeout_s=timeout_s + GRACE_S, call=f"evaluate({name})", process=ROLLOUTER)

    async def set_replicas(self, table: ReplicaTable) -> None:
        """`table`: with the controls of the replicas as its handles."""
        call = self.handle.set_replicas.remote(channels(table, self._client_id))
        await self._call(f"set_replicas({table.generation})", call)

    async def partials(self, timeout_s: float) -> list[PartialGroup]:
        return await self._call("partials", self.handle.partials.remote(), timeout_s)

    async def stats(self, timeout_s: float) -> RolloutStats:
        return await reply(self.handle.stats.remote(), timeout_s=timeout_s, call="stats", process=ROLLOUTER)

    async def stop(self, timeout_s: float) -> None:
        await reply(self.handle.stop.remote(), timeout_s=timeout_s, call="stop", process=ROLLOUTER)

    def kill(self) -> None:
        """Ends the process, also a stopped one. Idempotent."""
        ray.kill(self.handle)

    async def ended(self, timeout_s: float) -> None:
        """Returns when the process that was killed is gone. Raises DeadlineExceeded."""
        await ended(self.handle.stats.remote, timeout_s=timeout_s, process=ROLLOUTER)

    async def _call(self, call: str, ref: ray.ObjectRef, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return await reply(ref, timeout_s=timeout_s, call=call, process=ROLLOUTER)
