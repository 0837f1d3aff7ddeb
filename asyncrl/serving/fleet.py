"""The replicas behind one address: sends requests to them, and reports the state of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncrl.errors import GenerationError
from asyncrl.inference.replica_pool import ReplicaPool
from asyncrl.rollout.generation import GenerationClient, OnChunk
from asyncrl.rollout.router import prefix_blocks
from asyncrl.types import Generation, ReplicaRow, ReplicaState, ReplicaStats, SamplingParams


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The state of a replica as clients see it. `running` and `waiting`: requests in the engine; `version` None: it has
    no weights to serve yet; `node`: address of its machine; `detail`: why it is not alive."""

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
        """True while requests can be sent to it."""
        return self.state in ("serving", "held")


class Fleet:
    """Sends the requests of the HTTP side to the replicas of a pool. Owns the latest statistics of each replica."""

    def __init__(
        self,
        client: GenerationClient,
        replicas: ReplicaPool,
        *,
        refresh_s: float = 2.0,
        on_refresh: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            client: gets the table of the same pool.
            refresh_s: seconds between two health checks of every replica.
            on_refresh: called after every health check.
        """
        self._client = client
        self._replicas = replicas
        self._stats: dict[int, ReplicaStats] = {}
        self._refresh_s = refresh_s
        self._on_refresh = on_refresh
        self._look_now = asyncio.Event()

    async def generate(
        self, prompt_ids: np.ndarray, sampling: SamplingParams, *, session_id: str, seed: int, on_chunk: OnChunk
    ) -> Generation:
        """As `GenerationClient.generate`; without a session the request follows its prompt's prefix."""
        prefix = () if session_id else prefix_blocks(prompt_ids)
        try:
            return await self._client.generate(
                prompt_ids, sampling, session_id=session_id, seed=seed, prefix=prefix, on_chunk=on_chunk
            )
        except GenerationError:
            self._look_now.set()  # a replica with a dead engine refuses everything: find it before the next request
            raise

    @property
    def reports(self) -> list[ReplicaReport]:
        return [self._report(i, row) for i, row in self._replicas.table.rows.items()]

    def _report(self, replica_id: int, row: ReplicaRow) -> ReplicaReport:
        stats = self._stats.get(replica_id)
        if stats is None:
            return ReplicaReport(replica_id, row.state, detail=_found(row.detail))
        health = stats.health
        return ReplicaReport(
            replica_id, row.state, stats.node, stats.pid, health.version, health.running, health.waiting
        )

    @property
    def loads(self) -> dict[int, int]:
        """Requests in flight per replica that serves."""
        return self._client.loads

    @property
    def not_serving(self) -> str | None:
        """Why no replica can answer now; None when one can."""
        reports = self.reports
        if any(r.alive and r.version is not None for r in reports):
            return None
        if any(r.alive for r in reports):
            return "no replica has a committed version yet: their weights are placeholders until the first publish"
        reasons = "; ".join(f"replica {r.replica_id} is {r.state}: {r.detail}" for r in reports)
        return f"every replica is lost: {reasons}"

    async def watch(self) -> None:
        """Checks every replica each `refresh_s`. Raises RunFailed when one is lost and the restart budget is spent.

        Consumes: nothing.
        Produces: the latest statistics of every replica; a replacement, by the pool, for one that fails.
        Waits for: the replicas, each call with a deadline.
        Unblocked by: the answers, and a request that fails, which brings the next check forward.
        Stops when: it is cancelled, or a lost replica cannot be replaced.
        """
        watching = asyncio.create_task(self._replicas.watch(), name="replicas")
        try:
            while not watching.done():
                await self.refresh()
                wake = asyncio.create_task(self._look_now.wait())
                await asyncio.wait([wake, watching], timeout=self._refresh_s, return_when=asyncio.FIRST_COMPLETED)
                wake.cancel()
                self._look_now.clear()
            await watching
        finally:
            watching.cancel()

    async def refresh(self) -> None:
        """Gets the statistics of every replica that is up; the pool replaces those that are dead or do not answer."""
        self._stats = {stats.replica_id: stats for stats in await self._replicas.stats()}
        if self._on_refresh is not None:
            self._on_refresh()


def _found(detail: str) -> str:
    """The `found` part of an error message."""
    lines = detail.splitlines()
    return next((line.removeprefix("found: ") for line in lines if line.startswith("found: ")), detail)
