"""Clients of a pool's replicas: the one listener that routes requests by the pool's table, and the clients that have
ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from asyncrl.inference.replica import Replica
from asyncrl.inference.replica_actor import ReplicaControl
from asyncrl.types import ReplicaTable

logger = logging.getLogger(__name__)

Listener = Callable[[ReplicaTable], Awaitable[None]]


class PoolClients:
    """Sends the newest table to the listener, one call at a time. Remembers ended clients, so that a replica suspended
    at their end can forget them later."""

    def __init__(self, table: Callable[[], ReplicaTable], timeout_s: float) -> None:
        """
        Args:
            table: returns the present table.
            timeout_s: of a call to one replica.
        """
        self._table = table
        self._timeout_s = timeout_s
        self._listener: Listener | None = None
        self._told = -1
        """Generation of the table that the listener has."""
        self._turn = asyncio.Lock()
        self._forgotten: list[str] = []

    def listen(self, listener: Listener | None) -> None:
        """Sets the listener of the next `tell`; None: nobody."""
        self._listener, self._told = listener, -1

    def repeat(self) -> None:
        """Makes the next `tell` send the table even if unchanged: a connection can break although no process died."""
        self._told = -1

    async def tell(self) -> None:
        """Returns when the listener has the present table or a later one. Raises the listener's errors."""
        async with self._turn:
            listener, table = self._listener, self._table()
            if listener is not None and self._told != table.generation:
                await listener(table)
                if listener is self._listener:  # it may have been replaced during the call
                    self._told = table.generation

    async def tell_soon(self) -> None:
        """Like `tell`, but does not raise."""
        try:
            await self.tell()
        except Exception as error:  # noqa: BLE001 - task boundary: the next `tell` meets the same error, and raises
            logger.warning("the rollout side does not know of a change of the replicas yet: %s", error)

    async def forget(self, client_id: str, members: Mapping[int, ReplicaControl]) -> None:
        """Stops all work for this client, whose process has ended. Does not raise."""
        self._forgotten.append(client_id)
        calls = (control.call(self._timeout_s, Replica.forget_client, client_id) for control in members.values())
        for replica_id, outcome in zip(members, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                logger.warning("replica %d may still work for %s: %s", replica_id, client_id, outcome)

    async def forget_all(self, control: ReplicaControl) -> None:
        """Makes a returning replica stop all work for ended clients. Raises the error of a call."""
        for client_id in self._forgotten:
            await control.call(self._timeout_s, Replica.forget_client, client_id)
