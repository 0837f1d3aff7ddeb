"""The shells of a run in one process, without Ray: for tests that script their interleavings."""

from __future__ import annotations

from asyncrl.errors import ProcessDied
from asyncrl.inference.replica import Replica
from asyncrl.types import GenerationRequest, Manifest, TokenChunk, TransferSource

NO_SOURCE = TransferSource("fake", "", "", 0, 1, 0, 0)


class LocalReplicaChannel:
    """A `ReplicaChannel` that calls the replica directly. `die` makes it fail as the channel to a dead actor does."""

    def __init__(self, replica: Replica, client_id: str = "test") -> None:
        self._replica = replica
        self._client_id = client_id
        self._dead = False

    def die(self) -> None:
        self._dead = True

    async def submit(self, requests: list[GenerationRequest]) -> None:
        self._require_alive()
        await self._replica.submit(self._client_id, requests)

    async def collect(self, wait_s: float) -> list[TokenChunk]:
        self._require_alive()
        chunks = await self._replica.collect(self._client_id, wait_s)
        self._require_alive()
        return chunks

    async def abort(self, request_ids: list[str]) -> None:
        self._require_alive()
        await self._replica.abort(request_ids)

    def _require_alive(self) -> None:
        if self._dead:
            raise ProcessDied("the replica was killed by the test")


async def publish(replica: Replica, publish_id: int, version: int | None, mode: str = "abort") -> None:
    """One publish of nothing: pause, receive an empty manifest, commit."""
    await replica.pause(mode)  # type: ignore[arg-type]
    digest = await replica.receive_weights(Manifest(publish_id, version, (), ()), NO_SOURCE, 5.0)
    await replica.commit(publish_id, version, digest)
