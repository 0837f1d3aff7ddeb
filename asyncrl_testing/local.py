"""The shells of a run in one process, without Ray: for tests that script their interleavings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from asyncrl.errors import DeadlineExceeded, Process, ProcessDied
from asyncrl.inference.replica import Replica
from asyncrl.remote.actor_client import ActorClient
from asyncrl.types import (
    GenerationRequest,
    Manifest,
    ReplicaRow,
    ReplicaState,
    ReplicaStats,
    ReplicaTable,
    TokenChunk,
    TransferSource,
)

NO_SOURCE = TransferSource(endpoint="", bucket_bytes=0, num_receivers=1, epoch=0)


class Rows:
    """The table of replicas that a pool would send, changed row by row. Each change returns the table."""

    def __init__(self, handles: Mapping[int, Any] | None = None, state: ReplicaState = "serving") -> None:
        self.table = ReplicaTable(0, {i: ReplicaRow(h, state, 0) for i, h in (handles or {}).items()})

    def put(
        self, replica_id: int, handle: Any = None, state: ReplicaState = "serving", version: int | None = None
    ) -> ReplicaTable:
        """A row as it is now: another incarnation when there is a `handle`, else the one of before."""
        former = self.table.rows.get(replica_id)
        if handle is None:
            assert former is not None, replica_id
            row = replace(former, state=state, version=former.version if version is None else version)
        else:
            row = ReplicaRow(handle, state, 0 if former is None else former.incarnation + 1, version)
        return self._become({**self.table.rows, replica_id: row})

    def drop(self, *replica_ids: int) -> ReplicaTable:
        """Without these: their processes are dead, and the next ones have not started."""
        rows = dict(self.table.rows)
        for i in replica_ids:
            rows[i] = ReplicaRow(rows[i].handle, "starting", rows[i].incarnation + 1)
        return self._become(rows)

    def _become(self, rows: Mapping[int, ReplicaRow]) -> ReplicaTable:
        self.table = ReplicaTable(self.table.generation + 1, rows)
        return self.table


class LocalActor(ActorClient[Any]):
    """The client of an actor in this process: an object with the public methods of the actor's class, or the methods
    that a test needs. `kill` and `ended` call the object's."""

    def __init__(self, actor: Any, process: Process | None = None) -> None:
        super().__init__(actor, process or Process(type(actor).__name__))

    async def call(self, timeout_s: float, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await getattr(self.handle, method.__name__)(*args, **kwargs)
        except TimeoutError:
            if not deadline.expired():
                raise
            found = f"{method.__name__} of {self.process}: no answer within {timeout_s:g} s"
            raise DeadlineExceeded(found).of(self.process) from None

    def kill(self) -> None:
        self.handle.kill()

    async def ended(self, timeout_s: float, ping: Callable[..., Any]) -> None:
        await self.handle.ended()


class LocalReplicaChannel:
    """A `ReplicaChannel` that calls the replica directly. `die` makes it fail as the channel to a dead actor does.
    `external`: its client is not part of the run."""

    def __init__(self, replica: Replica, client_id: str = "test", *, external: bool = False) -> None:
        self._replica = replica
        self._client_id = client_id
        self._external = external
        self._dead = False

    def die(self) -> None:
        self._dead = True

    async def submit(self, requests: list[GenerationRequest]) -> None:
        self._require_alive()
        await self._replica.submit(self._client_id, requests, self._external)

    async def collect(self, wait_s: float, gather_s: float = 0.0) -> list[TokenChunk]:
        self._require_alive()
        chunks = await self._replica.collect(self._client_id, wait_s, gather_s)
        self._require_alive()
        return chunks

    async def abort(self, request_ids: list[str]) -> None:
        self._require_alive()
        await self._replica.abort(request_ids)

    async def stats(self, timeout_s: float) -> ReplicaStats:
        self._require_alive()
        async with asyncio.timeout(timeout_s):
            return await self._replica.stats()

    def _require_alive(self) -> None:
        if self._dead:
            raise ProcessDied("the replica was killed by the test")


async def publish(replica: Replica, publish_id: int, version: int | None, mode: str = "abort") -> None:
    """One publish of nothing: pause, receive an empty manifest, commit."""
    await replica.pause(mode)  # type: ignore[arg-type]
    digest = await replica.receive_weights(Manifest(publish_id, version, (), ()), NO_SOURCE, 5.0)
    await replica.commit(publish_id, version, digest)
