"""The training side of the message queue over its Ray actor handle: each call has a deadline and a name."""

from __future__ import annotations

from pathlib import Path

from asyncrl.queue.message_queue import MessageQueue
from asyncrl.remote.actor_client import CALL_TIMEOUT_S, ActorClient, ActorHandle
from asyncrl.remote.waits import MESSAGE_QUEUE
from asyncrl.types import Committed, GroupSummary, LeaseManifest, LeaseWait, LedgerCounts, PartialGroup

LOAD_TIMEOUT_S = 600.0
"""Longest that reading the queue's part of a checkpoint may take."""


class QueueControl:
    """What the coordinator calls of the message queue."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle
        self._actor = ActorClient(handle, MESSAGE_QUEUE, has_line=True)

    async def foresee(self, step: int, wait_s: float) -> tuple[GroupSummary, ...]:
        return await self._actor.call(wait_s + CALL_TIMEOUT_S, MessageQueue.foresee, step, wait_s)

    async def lease(self, step: int, wait_s: float) -> LeaseManifest | LeaseWait:
        return await self._actor.call(wait_s + CALL_TIMEOUT_S, MessageQueue.lease, step, wait_s)

    async def commit(self, step: int, *, leases_next: bool = False) -> Committed:
        return await self._actor.call(CALL_TIMEOUT_S, MessageQueue.commit, step, leases_next=leases_next)

    async def published(self, version: int) -> LedgerCounts:
        return await self._actor.call(CALL_TIMEOUT_S, MessageQueue.published, version)

    async def limit_lag(self, limit: int) -> LedgerCounts:
        return await self._actor.call(CALL_TIMEOUT_S, MessageQueue.limit_lag, limit)

    async def wait_idle(self, wait_s: float) -> bool:
        return await self._actor.call(wait_s + CALL_TIMEOUT_S, MessageQueue.wait_idle, wait_s)

    async def counts(self) -> LedgerCounts:
        return await self._actor.call(CALL_TIMEOUT_S, MessageQueue.counts)

    async def take_back_all(self, reason: str, client_id: str) -> int:
        return await self._actor.call(CALL_TIMEOUT_S, MessageQueue.take_back_all, reason, client_id)

    async def capture(self, partials: list[PartialGroup]) -> LedgerCounts:
        return await self._actor.call(CALL_TIMEOUT_S, MessageQueue.capture, partials)

    async def save(self, directory: Path, timeout_s: float) -> None:
        await self._actor.call(timeout_s, MessageQueue.save, directory)

    async def load(self, directory: Path) -> LedgerCounts:
        return await self._actor.call(LOAD_TIMEOUT_S, MessageQueue.load, directory)

    async def ping(self, timeout_s: float) -> float:
        return await self._actor.call(timeout_s, MessageQueue.ping)

    def kill(self) -> None:
        self._actor.kill()

    async def ended(self, timeout_s: float) -> None:
        """Returns when the killed process has exited. Raises DeadlineExceeded."""
        await self._actor.ended(timeout_s, MessageQueue.ping)
