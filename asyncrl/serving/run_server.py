"""The server of a run (`rollout.serve`): answers clients that are not part of the run, from the run's replicas. Runs as
a Ray actor on the driver's machine, which `driver.fleet.server_keeper` replaces when it dies.

    client --HTTP--> Api --> Fleet --> PlaceQueue --> GenerationClient --> Replica[0..R) of the run

The server is a client of the replicas, like a rollouter, so no call of the run waits for it. Its answers never enter
the queue.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.chat.server import Server, address_of, bind, is_local, serve_until
from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.data.model_files import check_model, hub_facts
from asyncrl.errors import AsyncRLError, ConfigError, cause
from asyncrl.inference.cpu_time import SERVER_NICENESS
from asyncrl.inference.external_places import ExternalLimits, PlaceQueue
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.router import Router
from asyncrl.serving.app import Api, ServedModel
from asyncrl.serving.discovery import DiscoveryFile, FleetAddress
from asyncrl.serving.fleet import Fleet
from asyncrl.serving.metrics import ServingMetrics
from asyncrl.serving.model_text import ModelText
from asyncrl.types import ReplicaState, ReplicaStats, ReplicaTable, RunServerStats

GRACE_S = 1
"""Time for requests in progress at the end of the run."""
REFRESH_S = 5.0
"""Seconds between two checks of every replica, and two writes of the discovery file."""
_UP: tuple[ReplicaState, ...] = ("newcomer", "serving", "held", "leased")


@dataclass(frozen=True, slots=True)
class RunServerSpec:
    """Arguments of the run's server. `max_lost`: an answer fails once this many replicas died while they worked on it.
    `api_key` None: no key required."""

    model: ModelConfig
    rollout: RolloutConfig
    max_lost: int
    discovery_file: Path
    api_key: str | None = field(default=None, repr=False)


class RunReplicas:
    """The replicas of the last table, for the fleet of a run's server. The run's own pool watches and replaces them."""

    def __init__(self) -> None:
        self.table = ReplicaTable()

    async def stats(self) -> list[ReplicaStats]:
        """Statistics of every replica that answers within `REFRESH_S`."""
        rows = self.table.those(*_UP).values()
        answers = await asyncio.gather(*(row.handle.stats(REFRESH_S) for row in rows), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, AsyncRLError):
                raise answer
        return [answer for answer in answers if isinstance(answer, ReplicaStats)]

    async def watch(self) -> None:
        """Never returns: the run replaces its replicas."""
        await asyncio.get_running_loop().create_future()


class RunServer:
    """Owns the HTTP server, the generation client and the places of external requests."""

    def __init__(
        self,
        spec: RunServerSpec,
        client_id: str,
        *,
        read_text: Callable[[RunServerSpec], ModelText] | None = None,
        niceness: int = SERVER_NICENESS,
    ) -> None:
        """
        Args:
            client_id: names this incarnation among all clients of the replicas.
            read_text: reads the tokenizer and the chat template; None: from the model's files.
            niceness: added to the niceness of this process.
        """
        self._spec = spec
        self._client_id = client_id
        self._read_text = _model_text if read_text is None else read_text
        self._niceness = niceness
        self._replicas = RunReplicas()
        settings = spec.rollout.serve
        self._limits = ExternalLimits.of(spec.rollout.settings.decodes_at_once, settings.share)
        self._places = PlaceQueue()
        self._metrics = ServingMetrics()
        self._stopped = asyncio.Event()
        self._address = ""
        self._client: GenerationClient
        self._fleet: Fleet
        self._server: Server

    async def start(self, port: int) -> RunServerStats:
        """Returns once the server listens on `port`. Port 0 picks a free port; so does a restart whose old port is
        taken, if the recipe says 0.

        Raises ConfigError: the address cannot be bound, or the tokenizer cannot be loaded; DeadlineExceeded,
        ProcessDied.
        """
        os.nice(self._niceness)
        settings = self._spec.rollout.serve
        text = await asyncio.to_thread(self._read_text, self._spec)
        try:
            listener = bind(settings.host, port)
        except ConfigError:
            # A restart asks for its old port; only a recipe with a fixed port requires it.
            if settings.port or not port:
                raise
            listener = bind(settings.host, 0)
        self._connect(listener, text)
        await self._server.listen(listener, "serve beside the run")
        return await self.stats()

    async def run(self) -> None:
        """Serves until `stop`. Raises the error that ended the HTTP server earlier."""
        stop = asyncio.create_task(self._stopped.wait(), name="stop")
        watching = asyncio.create_task(self._watch(), name="fleet")
        try:
            await serve_until(stop, self._server, self._server.serving, watching)
        finally:
            stop.cancel()
            await self._client.close()

    async def _watch(self) -> None:
        """Runs until cancelled. Raises the unexpected error of a part that talks to the replicas."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fleet.watch())
                group.create_task(self._client.watch())
        except ExceptionGroup as errors:
            raise cause(errors.exceptions) from None

    async def set_replicas(self, table: ReplicaTable) -> None:
        """Sends requests to the serving replicas of this table, whose handles are `ReplicaChannel`s of an external
        client."""
        self._replicas.table = table
        self._places.resize(len(table.those("serving", "held")) * self._limits.external)
        self._client.set_replicas(table)

    async def stats(self) -> RunServerStats:
        metrics = self._metrics
        running = metrics.in_flight - metrics.waiting
        return RunServerStats(self._address, max(0, running), metrics.waiting, metrics.refused)

    async def stop(self) -> None:
        """Refuses new requests and gives requests in progress a grace period. `run` then returns."""
        self._stopped.set()

    def _connect(self, listener: socket.socket, text: ModelText) -> None:
        """Builds the parts between the socket and the replicas."""
        spec, settings = self._spec, self._spec.rollout.serve
        self._address = address_of(listener)
        # a request waits for the replica of its session or prefix only if that replica has a free place
        spare = min(32, self._limits.external - 1)
        self._client = GenerationClient(
            self._client_id,
            self._replicas.table,
            request_timeout_s=settings.request_timeout_s + 60,  # the server's own deadline comes first
            poll_interval_s=spec.rollout.poll_every_s,
            waits_for_replacements=True,
            max_lost=spec.max_lost,
            router=Router(max_imbalance=spare, max_prefix_imbalance=min(8, spare)),
        )
        name = settings.model_name or spec.model.path
        found = FleetAddress(self._address, name, spec.rollout.engine, os.getpid(), time.time())
        file = DiscoveryFile(spec.discovery_file, found)
        fleet = self._fleet = Fleet(self._client, self._replicas, self._places, REFRESH_S)
        fleet.on_refresh = lambda: file.write(fleet.reports)
        api = Api(
            ServedModel(name, text, found.started_at, guided=spec.rollout.guided_decoding),
            fleet,
            self._metrics,
            api_key=spec.api_key,
            request_timeout_s=settings.request_timeout_s,
            max_requests=settings.max_requests,
            local_only=is_local(listener) and spec.api_key is None,
            wait_timeout_s=settings.wait_timeout_s,
        )
        self._server = api.server(GRACE_S)


def _model_text(spec: RunServerSpec) -> ModelText:
    facts = check_model(spec.model.path)
    facts = facts if facts.is_local else hub_facts(spec.model)
    return ModelText.of(spec.model, spec.rollout, facts.vocab_size)
