"""Channels from a client to the replicas: each call has a deadline and fails with a named error."""

from __future__ import annotations

import itertools
from dataclasses import replace

from asyncrl.inference.replica import Replica
from asyncrl.remote.actor_client import CALL_TIMEOUT_S, ActorClient, ActorHandle
from asyncrl.remote.waits import replica
from asyncrl.types import GenerationRequest, ReplicaStats, ReplicaTable, TokenChunk

_NUMBERS = itertools.count()
"""Numbers the channels of this process; the owner of the replicas makes tables, and channels with them."""


class ReplicaActorChannel:
    """A `ReplicaChannel` over a Ray actor handle. `external`: the client is not part of the run. `incarnation`: see
    `Replica.submit`. Each channel has its own outbox at the replica, so a collection with a broken connection cannot
    take chunks of the next channel."""

    def __init__(
        self,
        replica_id: int,
        handle: ActorHandle,
        client_id: str,
        *,
        external: bool = False,
        incarnation: int | None = None,
    ) -> None:
        self.actor = ActorClient(handle, replica(replica_id), is_direct=True)
        self._client_id = f"{client_id}/{next(_NUMBERS)}"
        self._external = external
        self._incarnation = incarnation

    async def submit(self, requests: list[GenerationRequest]) -> None:
        await self.actor.call(
            CALL_TIMEOUT_S, Replica.submit, self._client_id, requests, self._external, self._incarnation
        )

    async def collect(self, wait_s: float, gather_s: float) -> list[TokenChunk]:
        timeout_s = wait_s + CALL_TIMEOUT_S
        return await self.actor.call(timeout_s, Replica.collect, self._client_id, wait_s, gather_s)

    async def abort(self, request_ids: list[str]) -> None:
        await self.actor.call(CALL_TIMEOUT_S, Replica.abort, request_ids)

    async def stats(self, timeout_s: float) -> ReplicaStats:
        return await self.actor.call(timeout_s, Replica.stats)


def channels(table: ReplicaTable, client_id: str, *, external: bool = False) -> ReplicaTable:
    """The table with each replica's control replaced by a channel of this client."""
    rows = {}
    for i, row in table.rows.items():
        channel = ReplicaActorChannel(i, row.handle.handle, client_id, external=external, incarnation=row.incarnation)
        rows[i] = replace(row, handle=channel)
    return replace(table, rows=rows)
