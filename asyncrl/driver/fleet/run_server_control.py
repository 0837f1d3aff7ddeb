"""How the driver reaches the server of a run: each call has a deadline and fails with a named error."""

from __future__ import annotations

from asyncrl.driver.fleet.actor_channels import channels
from asyncrl.remote.actor_client import ActorClient, ActorHandle
from asyncrl.remote.waits import FOREVER_S, RUN_SERVER
from asyncrl.serving.run_server import RunServer
from asyncrl.types import ReplicaTable, RunServerStats


class RunServerControl:
    """The supervisor's calls to one server. `client_id`: its name among the clients of the replicas."""

    def __init__(self, handle: ActorHandle, client_id: str) -> None:
        self._actor = ActorClient(handle, RUN_SERVER)
        self._client_id = client_id

    async def start(self, port: int, timeout_s: float) -> RunServerStats:
        return await self._actor.call(timeout_s, RunServer.start, port)

    async def run(self) -> None:
        """Returns when the server was stopped. The call lasts as long as the server; its health checks bound it."""
        await self._actor.call(FOREVER_S, RunServer.run)

    async def set_replicas(self, table: ReplicaTable, timeout_s: float) -> None:
        """`table`: with the controls of the replicas as its handles."""
        await self._actor.call(timeout_s, RunServer.set_replicas, channels(table, self._client_id, external=True))

    async def stats(self, timeout_s: float) -> RunServerStats:
        return await self._actor.call(timeout_s, RunServer.stats)

    async def stop(self, timeout_s: float) -> None:
        await self._actor.call(timeout_s, RunServer.stop)

    def kill(self) -> None:
        self._actor.kill()

    async def ended(self, timeout_s: float) -> None:
        """Returns when the killed process has exited. Raises DeadlineExceeded."""
        await self._actor.ended(timeout_s, RunServer.stats)
