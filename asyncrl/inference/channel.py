"""How the coordinator reaches a replica: each call has a deadline and fails with a named error."""

from __future__ import annotations

from typing import Any

from asyncrl.inference.replica import ReplicaStats
from asyncrl.remote import reply
from asyncrl.types import Manifest, PauseMode
from asyncrl.weights.transport import Digest, TransferSource

GRACE_S = 5.0
"""What a call may take beyond the deadline that the replica itself keeps, so that its own error arrives."""


class ReplicaControl:
    """The control plane of one replica over its Ray actor handle."""

    def __init__(self, replica_id: int, handle: Any) -> None:
        self.handle = handle
        self.name = f"replica {replica_id}"

    async def start(self, timeout_s: float) -> ReplicaStats:
        return await self._call("start", timeout_s)

    async def pause(self, mode: PauseMode, timeout_s: float) -> None:
        await self._call("pause", timeout_s, mode)

    async def receive_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        return await self._call("receive_weights", timeout_s + GRACE_S, manifest, source, timeout_s)

    async def commit(self, publish_id: int, version: int | None, digest: Digest | None, timeout_s: float) -> None:
        await self._call("commit", timeout_s, publish_id, version, digest)

    async def stats(self, timeout_s: float) -> ReplicaStats:
        return await self._call("stats", timeout_s)

    async def stop(self, timeout_s: float) -> None:
        await self._call("stop", timeout_s)

    async def _call(self, method: str, timeout_s: float, *args: Any) -> Any:
        call = getattr(self.handle, method).remote(*args)
        return await reply(call, timeout_s=timeout_s, what=f"{method} of {self.name}")
