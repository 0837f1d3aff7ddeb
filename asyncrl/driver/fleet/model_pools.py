"""The pools of models other than the policy, such as the teacher of a distillation: started with the run, watched, and
restarted like the policy's replicas, each with its own budget. They never get a publish."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from asyncrl.config.checks import require
from asyncrl.config.recipe import Recipe
from asyncrl.driver.cluster.placement import Bundle, fit
from asyncrl.driver.cluster.ray_session import Cluster
from asyncrl.driver.fleet.replica_pool import ReplicaPool
from asyncrl.driver.fleet.standalone import standalone_pool
from asyncrl.errors import RunFailed, explain
from asyncrl.inference.engines import ENGINES
from asyncrl.observability.events import EventLog
from asyncrl.remote.tasks import concurrently
from asyncrl.types import ReplicaTable
from asyncrl.types.events import Event, ModelReplicaChanged, ReplicaEvent

Listener = Callable[[str, ReplicaTable], Awaitable[None]]
"""(section of the recipe, replica table of its pool)."""


@dataclass(frozen=True, slots=True)
class ClusterGpus:
    """GPUs of a cluster: `total`, and on each node the GPUs left by the run's replicas and ranks."""

    total: float
    free_of_nodes: tuple[int, ...]


def pool_gpus(recipe: Recipe, gpus: ClusterGpus) -> dict[str, float]:
    """GPUs of one replica of each pool; 0: computes on a CPU. Engines that take whole GPUs come first; embedded engines
    get one GPU each, or share the rest evenly.

    Raises ConfigError if the run leaves too few.
    """
    if not gpus.total:
        return dict.fromkeys(recipe.pools, 0.0)
    settings = {key: replicas for key, (_, replicas) in recipe.pools.items()}
    whole = {key: r.settings.num_workers for key, r in settings.items() if ENGINES[r.engine].takes_whole_gpus}
    sharing = [key for key, r in settings.items() if key not in whole and r.torch.device != "cpu"]
    free = sum(gpus.free_of_nodes)
    left = free - sum(each * settings[key].num_replicas for key, each in whole.items())
    bundles = [Bundle(each) for key, each in whole.items() for _ in range(settings[key].num_replicas)]
    require(
        left >= (1 if sharing else 0) and fit(bundles, gpus.free_of_nodes) is not None,
        asked=f"replicas of {' and '.join([*whole, *sharing])} beside those of the policy and the trainer ranks",
        found=f"of {gpus.total:g} GPUs these leave {free}: {', '.join(map(str, gpus.free_of_nodes)) or 0} on each "
        "node, and a replica lives on one",
        do="add GPUs, lower the number of replicas or ranks, or set "
        + " and ".join(f"{key}.engine=torch with {key}.torch.device=cpu" for key in (*whole, *sharing)),
    )
    count = sum(settings[key].num_replicas for key in sharing)
    share = math.floor(100 / math.ceil(count / left)) / 100 if sharing else 0.0
    return (
        dict.fromkeys(settings, 0.0) | {key: float(each) for key, each in whole.items()} | dict.fromkeys(sharing, share)
    )


class ModelPools:
    """Owns one `ReplicaPool` for each pool of the recipe.

    Consumes: failures that the health watch of each pool finds.
    Produces: replacements of replicas; the table of each pool, for the listener.
    Waits for: see `ReplicaPool`.
    Stops when: `stop` is called. `watch` raises once a pool has spent its budget.
    """

    def __init__(self, recipe: Recipe, gpus: ClusterGpus, cluster: Cluster, events: EventLog) -> None:
        """`gpus`: the free ones are for the pools. Raises ConfigError if too few are left."""
        self._recipe = recipe
        self._events = events
        self._listener: Listener | None = None
        self._pools: dict[str, ReplicaPool] = {}
        of_replica = pool_gpus(recipe, gpus)
        for key, (pool, replicas) in recipe.pools.items():
            self._pools[key] = standalone_pool(
                pool.model,
                replicas,
                recipe.recovery,
                environment=cluster.engine_environment(replicas.engine),
                start_timeout_s=recipe.ray.start_timeout_s,
                gpus=of_replica[key],
                on_event=lambda event, key=key: self._changed(key, event),
            )

    def __bool__(self) -> bool:
        return bool(self._pools)

    async def start(self) -> None:
        """Starts all replicas of all pools. Raises like `ReplicaPool.start`."""
        await asyncio.gather(*(pool.start() for pool in self._pools.values()))
        if self._listener is not None:
            await self.set_listener(self._listener)

    async def set_listener(self, listener: Listener) -> None:
        """Sends the table of each pool to this listener, now and after each change."""
        self._listener = listener
        for key, pool in self._pools.items():
            await pool.set_listener(lambda table, key=key: listener(key, table))

    async def watch(self) -> None:
        """Checks the health of all replicas until cancelled. Raises RunFailed if a pool has spent its budget."""

        async def one(key: str, pool: ReplicaPool) -> None:
            try:
                await pool.watch()
            except RunFailed as error:
                found = f"its replicas failed too often: {error}"
                do = "see the log; raise recovery.max_replica_restarts"
                raise RunFailed(explain(f"the {key} ({key}.path)", found, do)) from error

        await concurrently(one(key, pool) for key, pool in self._pools.items())

    async def forget_client(self, client_id: str) -> None:
        """`ReplicaPool.forget_client` of every pool."""
        for pool in self._pools.values():
            await pool.forget_client(client_id)

    async def stop(self) -> None:
        """Asks every replica to stop, then kills it."""
        for key, pool in self._pools.items():
            await pool.stop(ENGINES[self._recipe.pools[key][1].engine].stop_timeout_s)

    def _changed(self, key: str, event: Event) -> None:
        if isinstance(event, ReplicaEvent):
            error = str(getattr(event, "error", ""))
            self._events.write(ModelReplicaChanged(key, event.replica, event.kind, error))
