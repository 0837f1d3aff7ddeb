"""The replicas behind one address: who is alive, what it serves, and who takes the next request.

Consumes: requests of the HTTP side.   Produces: generations, and the state of every replica.
Waits for: replicas, each call with a deadline.
Stops when: every replica is lost; `watch` then raises why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from asyncrl.errors import DeadlineExceeded, GenerationError, ProcessDied
from asyncrl.rollout.generation import Generation, GenerationClient, OnChunk
from asyncrl.rollout.router import prefix_blocks
from asyncrl.types import ReplicaStats, SamplingParams

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 30.0
"""A replica that does not answer for this long is taken for dead."""


class ReplicaStatus(Protocol):
    """How the fleet asks a replica how it is. Raises ProcessDied, DeadlineExceeded, GenerationError."""

    async def stats(self, timeout_s: float) -> ReplicaStats: ...


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """`running` and `waiting`: requests in the engine; `version` None: it has no weights to serve yet. `detail`: why it
    is not alive."""

    replica_id: int
    node: str = ""
    pid: int = 0
    alive: bool = True
    version: int | None = None
    running: int = 0
    waiting: int = 0
    detail: str = ""


class Fleet:
    """Args:
    replicas: of the same ids as those of `client`.
    nodes: address of the machine that each replica runs on, where it is known.
    refresh_s: time between two looks at every replica.
    on_lost: called once for every replica that is given up.
    on_refresh: called after every look.
    """

    def __init__(
        self,
        client: GenerationClient,
        replicas: Mapping[int, ReplicaStatus],
        *,
        nodes: Mapping[int, str] | None = None,
        refresh_s: float = 2.0,
        on_lost: Callable[[int], None] | None = None,
        on_refresh: Callable[[], None] | None = None,
    ) -> None:
        self._client = client
        self._replicas = dict(replicas)
        self._states = {i: ReplicaState(i, (nodes or {}).get(i, "")) for i in self._replicas}
        self._refresh_s = refresh_s
        self._on_lost = on_lost
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
            self._look_now.set()  # a replica whose engine is dead refuses everything: find it before it takes more
            raise

    @property
    def states(self) -> list[ReplicaState]:
        serving = self._client.loads
        states = self._states.values()
        return [s if s.replica_id in serving or not s.alive else replace(s, alive=False) for s in states]

    @property
    def loads(self) -> dict[int, int]:
        """Requests in flight per live replica."""
        return self._client.loads

    @property
    def not_serving(self) -> str | None:
        """Why no replica can answer now; None when one can."""
        states = self.states
        if any(s.alive and s.version is not None for s in states):
            return None
        if any(s.alive for s in states):
            return "no replica has a committed version yet: their weights are placeholders until the first publish"
        reasons = "; ".join(f"replica {s.replica_id}: {s.detail or 'lost'}" for s in states)
        return f"every replica is lost: {reasons}"

    async def watch(self) -> None:
        """Looks at every replica again and again. Raises GenerationError when all are lost."""
        lost = asyncio.create_task(self._client.watch(), name="replicas")
        try:
            while not lost.done():
                await self.refresh()
                wake = asyncio.create_task(self._look_now.wait())
                await asyncio.wait([wake, lost], timeout=self._refresh_s, return_when=asyncio.FIRST_COMPLETED)
                wake.cancel()
                self._look_now.clear()
            await self.refresh()
            await lost
        finally:
            lost.cancel()

    async def refresh(self) -> None:
        """Asks every live replica how it is, and gives up those that are dead or do not answer."""
        await asyncio.gather(*(self._look(i) for i, s in self._states.items() if s.alive))
        if self._on_refresh is not None:
            self._on_refresh()

    async def _look(self, replica_id: int) -> None:
        state = self._states[replica_id]
        try:
            stats = await self._replicas[replica_id].stats(STATS_TIMEOUT_S)
        except (ProcessDied, DeadlineExceeded, GenerationError) as e:
            reason = _found(e)
        else:
            health = stats.health
            state = replace(
                state, pid=stats.pid, version=health.version, running=health.running, waiting=health.waiting
            )
            if replica_id in self._client.loads:
                self._states[replica_id] = state
                return
            reason = "the connection to it was lost"
        self._states[replica_id] = replace(state, alive=False, running=0, waiting=0, detail=reason)
        self._client.remove_replica(replica_id, reason)
        if self._on_lost is not None:
            self._on_lost(replica_id)


def _found(error: Exception) -> str:
    """What was found, of an error that may say more than that."""
    lines = str(error).splitlines()
    return next((line.removeprefix("found: ") for line in lines if line.startswith("found: ")), str(error))
