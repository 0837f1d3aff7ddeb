"""The processes of a run, and which of them restart together.

Three groups fail independently of each other: each replica (`driver.fleet.replica_pool`), the rollouter
(`driver.fleet.rollouters`), and the training side. The training side is the message queue, the trainer ranks and,
because its groups belong to the queue's ledger, the rollouter. It restarts from the last checkpoint; the
replicas keep running and get its weights.

The handles here are the only ones that keep the actors alive: none is detached, none is found by name.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config.threads import local_cores, trainer_threads
from asyncrl.driver.cluster.nodes import spans, usable_nodes
from asyncrl.driver.cluster.placement_groups import PlacementGroups
from asyncrl.driver.cluster.ray_session import Cluster
from asyncrl.driver.fleet.device_turns import SharedDevices
from asyncrl.driver.fleet.engine_turns import EngineTurns
from asyncrl.driver.fleet.fleet_size import FleetLimits, FleetSize
from asyncrl.driver.fleet.membership import PoolSettings
from asyncrl.driver.fleet.model_pools import ClusterGpus, ModelPools
from asyncrl.driver.fleet.replica_pool import ReplicaPool
from asyncrl.driver.fleet.rollouters import POLICY, Rollouters
from asyncrl.driver.fleet.trainer_pool import TrainerPool
from asyncrl.driver.run_spec import RunSpec
from asyncrl.errors import AsyncRLError, cause
from asyncrl.inference.engines import ENGINES, require_sleep
from asyncrl.inference.replica_actor import ReplicaControl, spawn_replica
from asyncrl.observability.events import EventLog
from asyncrl.queue.message_queue import MessageQueue, QueueSpec
from asyncrl.remote.actor_client import CALL_TIMEOUT_S, ActorClient
from asyncrl.remote.failure_policy import RestartBudget
from asyncrl.remote.waits import MESSAGE_QUEUE, ROLLOUTER, RUN_SERVER
from asyncrl.rollout.rollouter import Rollouter, RolloutSpec
from asyncrl.rollout.sample_files import RolloutFiles
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import ReplicaTable

if TYPE_CHECKING:
    from asyncrl.driver.fleet.server_keeper import ServerKeeper

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 3.0
"""Longest time for one part to stop before its process is killed."""
END_TIMEOUT_S = 30.0
"""Longest time for a killed process to exit; Ray takes up to 6 s."""
GPU_END_TIMEOUT_S = 120.0
"""The same for ranks with GPUs, whose hosts take back up to hundreds of GB of pinned memory."""


class Actors:
    """The actors of a run, their owners, and the clients to call them."""

    def __init__(self, spec: RunSpec, cluster: Cluster, placements: PlacementGroups, events: EventLog) -> None:
        self._spec = spec
        self._placements = placements
        self._recipe = recipe = spec.recipe
        self._events = events
        self._on_driver = {
            "num_cpus": 0,
            "max_concurrency": 1000,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        }
        self._environment = cluster.engine_environment(recipe.rollout.engine)
        if recipe.is_colocated and not placements.placement.shares_gpus:
            require_sleep(recipe.rollout.engine)
        self.pools = ModelPools(recipe, _gpus_beside(placements), cluster, events)
        recovery = recipe.recovery
        devices = SharedDevices() if recipe.is_colocated else None
        self._rollouter_budget = RestartBudget(recovery.max_restarts, recovery.window_s)
        # Replicas first: engines that share devices and the fleet size act on their pool.
        self.replicas = ReplicaPool(
            self._spawn_replica,
            recipe.rollout.num_replicas,
            PoolSettings(
                max_restarts=recovery.replica_restarts(recipe.rollout.most_replicas),
                window_s=recovery.window_s,
                rejoin_timeout_s=recovery.rejoin_timeout_s,
                start_timeout_s=recipe.ray.start_timeout_s,
                health_interval_s=recipe.ray.health_interval_s,
                health_timeout_s=recipe.ray.health_timeout_s,
                quorum=recipe.rollout.start_quorum,
                stop_timeout_s=ENGINES[recipe.rollout.engine].stop_timeout_s,
                is_resized=True,
            ),
            on_event=events.write,
            devices=devices,
        )
        start_s = recipe.ray.start_timeout_s
        self.engines = None if devices is None else EngineTurns(self.replicas, devices, start_timeout_s=start_s)
        """None unless the engines share their devices with the trainer."""
        fixed_by = "rollout.engine=remote" if recipe.rollout.engine == "remote" else ""
        fixed_by = "placement=colocated" if recipe.is_colocated else fixed_by
        limits = FleetLimits(recipe.rollout.num_replicas, recipe.rollout.max_replicas, fixed_by)
        self.fleet_size = FleetSize(self.replicas, placements, limits, start_timeout_s=start_s, on_event=events.write)
        self.queue_writer = ""
        """Names the present queue in its events."""
        self.queue = self._new_queue()
        self.rollouter = self._new_rollouters()
        self.trainers: TrainerPool | None = None
        self.server = self._new_server() if recipe.rollout.serve.enabled else None
        """Serves clients outside the run; its failures do not end the run."""

    async def start(self) -> None:
        """Starts all parts concurrently; where engines share devices with trainer ranks, these start after the engines
        have loaded: an engine measures what others leave, and takes what others free meanwhile for its own. The run
        server starts last. Raises the first error of any part."""
        if self.engines is not None:
            await self.replicas.start()
            await self.engines.sleep()
            await self._start_training_side(self.pools.start())
        elif self._placements.placement.shares_gpus and ENGINES[self._recipe.rollout.engine].takes_whole_gpus:
            await self.replicas.start()
            await self._start_training_side(self.pools.start())
        else:
            await self._start_training_side(self.replicas.start(), self.pools.start())
        if self.server is not None:
            self.server.start()

    async def restart_training_side(self) -> None:
        """Starts a new, empty queue, rollouter and trainer pool, once the old ones have exited and the replicas have
        forgotten the old rollouter. Raises the error of a failed start."""
        # Phase 1: kill the old processes and wait for their exits.
        ends = [self.rollouter.ended(END_TIMEOUT_S), self.queue.ended(END_TIMEOUT_S, MessageQueue.ping)]
        if (trainers := self.trainers) is not None:
            trainers.kill()
            on_gpus = self._placements.placement.rank_gpus > 0
            ends.append(trainers.ended(GPU_END_TIMEOUT_S if on_gpus else END_TIMEOUT_S))
        self.rollouter.kill()
        self.queue.kill()
        await asyncio.gather(*ends)
        # Phase 2: the replicas survive; drop their requests of the old rollouter.
        self.trainers = None
        for client_id in self.rollouter.client_ids:
            await self._forget_client(client_id)
        await self.replicas.fence()
        if self.engines is not None:  # the new ranks load in the trainer's turn
            await self.engines.sleep()
        # Phase 3: start the replacements.
        self.queue = self._new_queue()
        self.rollouter = self._new_rollouters()
        await self._start_training_side()

    async def stop(self) -> None:
        """Asks every part to stop, and kills those that do not stop in time."""
        if self.server is not None:
            await self.server.stop(STOP_TIMEOUT_S)
        stops = [self.replicas.stop(ENGINES[self._recipe.rollout.engine].stop_timeout_s), self.pools.stop()]
        if self.trainers is not None:
            stops.append(self.trainers.stop())
        # The rollouter first: a group that loses its replica now would be counted as failed.
        first = await asyncio.gather(self.rollouter.stop(STOP_TIMEOUT_S), return_exceptions=True)
        for failure in (*first, *await asyncio.gather(*stops, return_exceptions=True)):
            if isinstance(failure, AsyncRLError):
                logger.info("while stopping: %s", failure)
            elif isinstance(failure, BaseException):
                logger.warning("while stopping: %r", failure)
        self.rollouter.kill()
        self.queue.kill()

    async def _start_training_side(self, *others: Any) -> None:
        recipe, timeout_s = self._recipe, self._recipe.ray.start_timeout_s
        cores, num_nodes, gpus = _smallest_node()
        placement = self._placements.placement
        threads = trainer_threads(
            recipe,
            cores=cores,
            num_nodes=1 if placement.strategy == "STRICT_PACK" else num_nodes,
            node_gpus=gpus if placement.rank_gpus else 0,
        )
        spec = TrainerSpec.of(recipe, num_threads=threads)
        await self.replicas.set_listener(self._set_replicas)
        await self.pools.set_listener(self.rollouter.set_pool)
        trainers: asyncio.Task[TrainerPool] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                trainers = group.create_task(self._start_trainers(spec))
                for work in (self.rollouter.start(timeout_s), *others):
                    group.create_task(work)
        except BaseException as error:  # also a cancelled start leaves no rank behind
            if trainers is not None and not trainers.cancelled() and trainers.exception() is None:
                trainers.result().kill()
            if not isinstance(error, ExceptionGroup):
                raise
            raise cause(error.exceptions) from None
        self.trainers = trainers.result()

    async def _start_trainers(self, spec: TrainerSpec) -> TrainerPool:
        timeout_s, gpus = self._recipe.ray.start_timeout_s, self._placements.placement.rank_gpus
        strategies = await self._placements.of_ranks(timeout_s)
        return await TrainerPool.start(spec, self.queue.handle, gpus, timeout_s, strategies=strategies)

    def _spawn_replica(self, replica_id: int) -> ReplicaControl:
        return spawn_replica(
            self._recipe.rollout,
            self._recipe.model,
            replica_id,
            num_gpus=self._placements.placement.replica_gpus,
            environment=self._environment,
            place=self._placements.of_replica(replica_id),
        )

    async def _set_replicas(self, table: ReplicaTable) -> None:
        """Sends the table to the rollouters. The run server gets it asynchronously: nobody waits for it."""
        if self.server is not None:
            self.server.set_replicas(table)
        await self.rollouter.set_pool(POLICY, table)

    def _new_server(self) -> ServerKeeper:
        # Imported here: FastAPI is slow to import, and few runs serve.
        from asyncrl.driver.fleet.server_keeper import ServerKeeper
        from asyncrl.serving.run_server import RunServer, RunServerSpec

        run, recipe, recovery = self._spec, self._recipe, self._recipe.recovery
        max_lost = recovery.replicas_per_response(recipe.rollout.num_replicas)
        file = run.directory.serving
        spec = RunServerSpec(recipe.model, recipe.rollout, max_lost, file, run.serving_key)

        def spawn(client_id: str) -> ActorClient[RunServer]:
            actor = ray.remote(RunServer).options(**self._on_driver)
            return ActorClient(actor.remote(spec, client_id), RUN_SERVER)

        return ServerKeeper(
            spawn,
            self.replicas.forget_client,
            port=recipe.rollout.serve.port,
            budget=RestartBudget(recovery.max_restarts, recovery.window_s),
            times=recipe.ray,
            discovery_file=file,
        )

    def _new_queue(self) -> ActorClient[MessageQueue]:
        spec = QueueSpec(self._recipe, self._spec.directory.events, self._spec.hide)
        self.queue_writer = spec.writer
        handle = ray.remote(untraced(MessageQueue)).options(**self._on_driver).remote(spec)
        return ActorClient(handle, MESSAGE_QUEUE, is_direct=True)

    def _new_rollouters(self) -> Rollouters:
        run, recipe = self._spec, self._recipe
        files = RolloutFiles(run.directory.samples, run.directory.spans, run.directory.quarantine)
        spec = RolloutSpec(recipe, run.train, run.held_out, files, run.hide)
        queue = self.queue

        def spawn(client_id: str) -> ActorClient[Rollouter]:
            actor = ray.remote(untraced(Rollouter)).options(**self._on_driver)
            return ActorClient(actor.remote(spec, queue, client_id), ROLLOUTER)

        def take_back(reason: str, client_id: str) -> Awaitable[int]:
            return queue.call(CALL_TIMEOUT_S, MessageQueue.take_back_all, reason, client_id)

        return Rollouters(
            spawn,
            take_back,
            self._forget_client,
            count=recipe.rollout.num_rollouters,
            budget=self._rollouter_budget,
            start_timeout_s=recipe.ray.start_timeout_s,
            on_event=self._events.write,
        )

    async def _forget_client(self, client_id: str) -> None:
        await self.replicas.forget_client(client_id)
        await self.pools.forget_client(client_id)


def _gpus_beside(placements: PlacementGroups) -> ClusterGpus:
    free = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}
    total = sum(free.values())
    for bundle, node in zip(placements.placement.bundles, placements.nodes(), strict=False):
        if node is not None:
            free[node] -= bundle.gpus
    return ClusterGpus(total, tuple(free.values()))


def _smallest_node() -> tuple[int, int, int]:
    """Cores of the smallest usable node, the number of usable nodes, and the GPUs of the largest. On a single machine
    the system's core count is a further upper bound: Ray's number may exceed what the run may use."""
    nodes = usable_nodes(ray.nodes())
    resources = [node["Resources"] for node in nodes]
    usable = [count for found in resources if (count := int(found.get("CPU", 0))) >= 1]
    gpus = max((int(found.get("GPU", 0)) for found in resources), default=0)
    if spans(nodes, ray.get_runtime_context().get_node_id()) and usable:
        return min(usable), len(usable), gpus
    return min([local_cores(), *usable]), 1, gpus


def untraced(cls: type) -> type:
    """A class for `ray.remote` that holds an object of `cls` and forwards its public methods. Ray wraps every method
    of an actor class for tracing, even with tracing off: a tenth of a rollouter's time."""

    def begin(self: Any, *args: Any, **options: Any) -> None:
        self._inner = cls(*args, **options)

    public = {n: m for n, m in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")}
    forwarded = {name: _forwarded(name, inspect.iscoroutinefunction(method)) for name, method in public.items()}
    return type(cls.__name__, (), {"__doc__": cls.__doc__, "__init__": begin, **forwarded})


def _forwarded(name: str, is_async: bool) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(self._inner, name)(*args, **options)

    async def call_async(self: Any, *args: Any, **options: Any) -> Any:
        return await getattr(self._inner, name)(*args, **options)

    return call_async if is_async else call
