"""The replicas behind one address: sends them requests, and reports their states."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from asyncrl.errors import GenerationError
from asyncrl.inference.external_places import PlaceQueue
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.replica_link import OnChunk
from asyncrl.rollout.router import Affinity, prefix_blocks
from asyncrl.types import Generation, ReplicaRow, ReplicaState, ReplicaStats, ReplicaTable, SamplingParams


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The state of a replica as clients see it. `running` and `waiting`: requests in the engine; `version` None: no
    weights to serve yet; `node`: address of its machine; `detail`: why it is not alive."""

    replica_id: int
    state: ReplicaState
    node: str = ""
    pid: int = 0
    version: int | None = None
    running: int = 0
    waiting: int = 0
    detail: str = ""

    @property
    def alive(self) -> bool:
        """Whether requests can be sent to it."""
        return self.state in ("serving", "held")


class FleetReplicas(Protocol):
    """The replicas behind a fleet: a server's own `ReplicaPool`, or a run's `serving.run_server.RunReplicas`."""

    @property
    def table(self) -> ReplicaTable: ...
    async def stats(self) -> list[ReplicaStats]:
        """Statistics of every replica that answers."""
        ...

    async def watch(self) -> None:
        """Runs until cancelled. Raises RunFailed: a replica is lost and will not be replaced."""
        ...


@dataclass(eq=False)
class Fleet:
    """Sends the requests of the HTTP side to the replicas. Owns their latest statistics.

    Args:
        client: has the table of the same replicas.
        places: bounds the requests at the replicas; None: no bound.
        refresh_s: seconds between two health checks of every replica.
        on_refresh: called after every health check.
    """

    client: GenerationClient
    replicas: FleetReplicas
    places: PlaceQueue | None = None
    refresh_s: float = 2.0
    on_refresh: Callable[[], None] = lambda: None
    stats: dict[int, ReplicaStats] = field(default_factory=dict, init=False)
    look_now: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def generate(
        self,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        *,
        session_id: str,
        seed: int,
        on_chunk: OnChunk,
        near: int | None = None,
        only: int | None = None,
    ) -> Generation:
        """As `GenerationClient.generate`; without a session the prefix of the prompt selects the replica. `near`,
        `only`: as in `router.Affinity`."""
        affinity = Affinity(() if session_id else prefix_blocks(prompt_ids), near, only)
        try:
            async with self.places or nullcontext():
                return await self.client.generate(
                    prompt_ids, sampling, session_id=session_id, seed=seed, affinity=affinity, on_chunk=on_chunk
                )
        except GenerationError:
            self.look_now.set()  # a replica with a dead engine refuses all requests: find it before the next one
            raise

    @property
    def reports(self) -> list[ReplicaReport]:
        return [self._report(i, row) for i, row in self.replicas.table.rows.items()]

    def _report(self, replica_id: int, row: ReplicaRow) -> ReplicaReport:
        stats = self.stats.get(replica_id)
        if stats is None:
            return ReplicaReport(replica_id, row.state, detail=_found(row.detail))
        health = stats.health
        return ReplicaReport(
            replica_id, row.state, stats.node, stats.pid, health.version, health.running, health.waiting
        )

    def not_serving(self, only: int | None = None) -> str | None:
        """Why no replica (or not replica `only`) can answer now; None if one can."""
        reports = [report for report in self.reports if only in (None, report.replica_id)]
        if any(r.alive and r.version is not None for r in reports):
            return None
        # From the temporary reasons to the permanent one: asleep, before the first publish, down.
        rows = self.replicas.table.rows
        if reports and all(rows[r.replica_id].asleep for r in reports if r.replica_id in rows):
            return "the trainer has its turn on the devices of the replicas: they answer after the next publish"
        if any(r.alive for r in reports):
            return "no replica has a committed version yet: their weights are placeholders until the first publish"
        reasons = "; ".join(f"replica {r.replica_id} is {r.state}: {r.detail}" for r in reports)
        return f"no replica serves: {reasons}"

    async def watch(self) -> None:
        """Checks every replica each `refresh_s`. Raises RunFailed: a replica is lost and the restart budget is spent.

        Consumes: nothing.
        Produces: the latest statistics of every replica; a replacement, by the pool, for each failed replica.
        Waits for: the replicas, each call with a deadline.
        Unblocked by: the answers, and a request that fails, which brings the next check forward.
        Stops when: it is cancelled, or a lost replica cannot be replaced.
        """
        watching = asyncio.create_task(self.replicas.watch(), name="replicas")
        try:
            while not watching.done():
                await self.refresh()
                # A failed request wakes the loop before `refresh_s` is over.
                wake = asyncio.create_task(self.look_now.wait())
                await asyncio.wait([wake, watching], timeout=self.refresh_s, return_when=asyncio.FIRST_COMPLETED)
                wake.cancel()
                self.look_now.clear()
            await watching
        finally:
            watching.cancel()

    async def refresh(self) -> None:
        """Gets the statistics of every running replica; the pool replaces dead or unresponsive ones."""
        self.stats = {stats.replica_id: stats for stats in await self.replicas.stats()}
        self.on_refresh()


def _found(detail: str) -> str:
    """The `found` part of an error message."""
    lines = detail.splitlines()
    return next((line.removeprefix("found: ") for line in lines if line.startswith("found: ")), detail)
