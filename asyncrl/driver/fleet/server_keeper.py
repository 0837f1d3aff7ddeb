"""Keeps the server of a run up. The run goes on whatever happens to the server."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from asyncrl.config.run import RayConfig
from asyncrl.driver.fleet.actor_channels import channels
from asyncrl.errors import AsyncRLError, ProcessDied
from asyncrl.remote.actor_client import ActorClient
from asyncrl.remote.failure_policy import RestartBudget
from asyncrl.remote.tasks import cancel
from asyncrl.remote.waits import FOREVER_S
from asyncrl.serving.run_server import RunServer
from asyncrl.types import ReplicaTable, RunServerReport, RunServerStats

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""Longest time for a killed server to exit and free its port."""
RESTART_DELAY_S = 1.0
"""Delay before the start of the next server."""


class ServerKeeper:
    """Owns the server's process, its restart budget and the newest replica table. No method raises, and only `stop`
    waits for the server.

    Consumes: replica tables; deaths and missed health checks of the server.
    Produces: a running server that has the newest table, under the same port.
    Waits for: starts and calls of the server, each with its deadline.
    Unblocked by: the answers; a table; the end of the server.
    Stops when: `stop` is called, or the budget is spent. The run then goes on without a server, and the log says so.
    """

    def __init__(
        self,
        spawn: Callable[[str], ActorClient[RunServer]],
        forget: Callable[[str], Awaitable[None]],
        *,
        port: int,
        budget: RestartBudget,
        times: RayConfig,
        discovery_file: Path,
        restart_delay_s: float = RESTART_DELAY_S,
    ) -> None:
        """
        Args:
            spawn: makes an actor from its client id, not started.
            forget: makes the replicas drop a dead client.
            port: of the recipe; 0 picks a free port, which later servers keep.
            discovery_file: removed while no server is up.
        """
        self._spawn = spawn
        self._forget = forget
        self._port = port
        self._budget = budget
        self._times, self._restart_delay_s = times, restart_delay_s
        self._file = discovery_file
        self._table = ReplicaTable()
        self._changed = asyncio.Event()
        self._current: ActorClient[RunServer] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stats: RunServerStats | None = None
        """Of the present server; None while none is up."""
        self._refused_before = 0
        """Requests that ended servers refused."""
        self._stopping = False

    @property
    def report(self) -> RunServerReport:
        """The server at its last health check, and the counts of all servers so far."""
        stats = self._stats
        running, waiting, refused = (0, 0, 0) if stats is None else (stats.running, stats.waiting, stats.refused)
        refused += self._refused_before
        return RunServerReport(stats is not None, running, waiting, refused, self._budget.total)

    def set_replicas(self, table: ReplicaTable) -> None:
        """Schedules sending the table, whose handles are the replicas' controls, to the server."""
        self._table = table
        self._changed.set()

    def start(self) -> None:
        """Begins to keep a server up."""
        self._remove_file()  # left by a killed run
        self._task = asyncio.create_task(self._keep(), name="server of the run")

    async def stop(self, timeout_s: float) -> None:
        """Asks the server to stop, then kills it."""
        self._stopping = True
        current, task = self._current, self._task
        if current is not None and task is not None and self._stats is not None:
            try:
                await current.call(timeout_s, RunServer.stop)
                await asyncio.wait([task], timeout=timeout_s)
            except AsyncRLError as error:
                logger.info("while stopping: %s", error)
        if task is not None:
            await cancel(task)
        if current is not None:
            current.kill()
        self._remove_file()

    async def _keep(self) -> None:
        while True:
            client_id = f"server-{uuid.uuid4().hex[:12]}"  # a fresh id: replicas refuse forgotten clients
            current: ActorClient[RunServer] | None = None
            try:
                current = self._current = self._spawn(client_id)
                await self._attend(current, client_id)
                failure: Exception = ProcessDied("it ended by itself")
            except Exception as error:  # noqa: BLE001 - task boundary: the run goes on whatever the server does
                failure = error
            if self._stopping:
                return
            self._refused_before = self.report.refused
            self._stats = None
            await self._clear(current, client_id)
            if not self._budget.take():
                logger.error(
                    "the server of the run has failed and, after %s, stays down: %s; the run goes on without it, and "
                    "recovery.max_restarts sets the limit",
                    self._budget,
                    failure,
                )
                return
            logger.error("the server of the run has failed and is restarted: %s", failure)
            await asyncio.sleep(self._restart_delay_s)

    async def _attend(self, current: ActorClient[RunServer], client_id: str) -> None:
        """Starts this server and serves its calls until it ends. Raises the error that ended it."""
        times = self._times
        self._stats = await current.call(times.start_timeout_s, RunServer.start, self._port)
        self._port = urlsplit(self._stats.address).port or self._port
        logger.info("clients may ask the policy of this run at %s/v1", self._stats.address)
        # Lasts as long as the run; the health checks below bound it.
        running = asyncio.create_task(current.call(FOREVER_S, RunServer.run), name="run of the server")
        told: ReplicaTable | None = None
        try:
            # Each round sends a new table, if any, and checks the health; a new table starts the next round early.
            while not running.done():
                self._changed.clear()
                if told is not self._table:
                    told = self._table
                    table = channels(told, client_id, external=True)
                    await current.call(times.health_timeout_s, RunServer.set_replicas, table)
                self._stats = await current.call(times.health_timeout_s, RunServer.stats)
                change = asyncio.create_task(self._changed.wait())
                await asyncio.wait(
                    [running, change], timeout=times.health_interval_s, return_when=asyncio.FIRST_COMPLETED
                )
                change.cancel()
            await running
        finally:
            await cancel(running)

    async def _clear(self, current: ActorClient[RunServer] | None, client_id: str) -> None:
        """Removes the remains of a dead server: its process, its file, and its requests at the replicas."""
        if current is not None:
            current.kill()
            try:
                await current.ended(END_TIMEOUT_S, RunServer.stats)
            except AsyncRLError as error:
                logger.warning("the dead server of the run may still hold its port: %s", error)
        self._remove_file()
        try:
            await self._forget(client_id)
        except Exception as error:  # noqa: BLE001 - task boundary: its requests end by themselves, uncollected
            logger.warning("replicas may still work for the dead server %s: %s", client_id, error)

    def _remove_file(self) -> None:
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s names a server that is not there, and cannot be removed: %s", self._file, error)
