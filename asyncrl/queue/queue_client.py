"""The training side of the message queue over its Ray actor handle: each call has a deadline and a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.remote.reply import ended, reply
from asyncrl.remote.waits import MESSAGE_QUEUE
from asyncrl.types import EndShares, LeaseManifest, LeaseWait, LedgerCounts, PartialGroup

CALL_TIMEOUT_S = 60.0
"""Longest that a call that does not wait by contract may take; a long poll gets its own wait on top."""

LOAD_TIMEOUT_S = 600.0
"""Longest that reading the queue's part of a checkpoint may take."""


class QueueControl:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def lease(self, step: int, wait_s: float) -> LeaseManifest | LeaseWait:
        return await self._call("lease", wait_s, step, wait_s)

    async def commit(self, step: int) -> LedgerCounts:
        return await self._call("commit", 0.0, step)

    async def published(self, version: int) -> LedgerCounts:
        return await self._call("published", 0.0, version)

    async def wait_idle(self, wait_s: float) -> bool:
        return await self._call("wait_idle", wait_s, wait_s)

    async def counts(self) -> LedgerCounts:
        return await self._call("counts", 0.0)

    async def window(self) -> EndShares:
        return await self._call("window", 0.0)

    async def take_back_all(self, reason: str, client_id: str) -> int:
        return await self._call("take_back_all", 0.0, reason, client_id)

    async def capture(self, partials: list[PartialGroup]) -> LedgerCounts:
        return await self._call("capture", 0.0, partials)

    async def save(self, directory: Path, timeout_s: float) -> None:
        call = self.handle.save.remote(directory)
        await reply(call, timeout_s=timeout_s, call="save", process=MESSAGE_QUEUE)

    async def load(self, directory: Path) -> LedgerCounts:
        call = self.handle.load.remote(directory)
        return await reply(call, timeout_s=LOAD_TIMEOUT_S, call="load", process=MESSAGE_QUEUE)

    async def ended(self, timeout_s: float) -> None:
        """Returns when the process that was killed is gone. Raises DeadlineExceeded."""
        await ended(self.handle.ping.remote, timeout_s=timeout_s, process=MESSAGE_QUEUE)

    async def ping(self, timeout_s: float) -> float:
        return await reply(self.handle.ping.remote(), timeout_s=timeout_s, call="ping", process=MESSAGE_QUEUE)

    async def _call(self, method: str, wait_s: float, *args: Any) -> Any:
        call = getattr(self.handle, method).remote(*args)
        return await reply(call, timeout_s=wait_s + CALL_TIMEOUT_S, call=method, process=MESSAGE_QUEUE)
