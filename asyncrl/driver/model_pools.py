"""The pools of other models than the policy, such as the teacher of a distillation: started with the run, watched, and
restarted like the policy's replicas, each with a budget of its own. They never get a publish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from asyncrl.config.recipe import Recipe
from asyncrl.errors import RunFailed, explain
from asyncrl.inference.engines import ENGINES
from asyncrl.inference.replica_actor import replica_gpus
from asyncrl.inference.replica_pool import ReplicaPool
from asyncrl.inference.standalone import standalone_pool
from asyncrl.types import ReplicaTable
from asyncrl.types.events import Event, ModelReplicaChanged, ReplicaEvent

Listener = Callable[[str, ReplicaTable], Awaitable[None]]
"""(section of the recipe, the replicas of its pool)."""


def sharing_replicas(recipe: Recipe) -> int:
    """The replicas of all pools whose engine shares GPUs with other processes."""
    return sum(r.num_replicas for _, r in recipe.pools.values() if not ENGINES[r.engine].takes_whole_gpus)


class ModelPools:
    """Owns one `ReplicaPool` for each pool of the recipe.

    Consumes: failures that the health watch of each pool finds.
    Produces: replacements of replicas; the table of each pool, for the listener.
    Waits for: as `ReplicaPool`.
    Stops when: `stop` is called. `watch` raises once a pool has spent its budget.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        num_sharing: int,
        environment: Callable[[str], Mapping[str, str]],
        on_event: Callable[[Event], None],
    ) -> None:
        """
        Args:
            num_sharing: processes of the run that share the GPUs of the cluster, those of the pools included.
            environment: name of an engine -> variables that its processes need.
            on_event: `EventLog.write`.
        """
        self._recipe = recipe
        self._on_event = on_event
        self._listener: Listener | None = None
        self.num_gpus = 0.0
        """GPUs of all replicas of all pools."""
        self._pools: dict[str, ReplicaPool] = {}
        for key, (pool, replicas) in recipe.pools.items():
            gpus = replica_gpus(replicas, num_sharing)
            self.num_gpus += gpus * replicas.num_replicas
            self._pools[key] = standalone_pool(
                pool.model,
                replicas,
                recipe.recovery,
                environment=environment(replicas.engine),
                start_timeout_s=recipe.ray.start_timeout_s,
                gpus=gpus,
                on_event=lambda event, key=key: self._changed(key, event),
            )

    def __bool__(self) -> bool:
        return bool(self._pools)

    async def start(self) -> None:
        """Starts all replicas of all pools. Raises what `ReplicaPool.start` raises."""
        await asyncio.gather(*(pool.start() for pool in self._pools.values()))
        if self._listener is not None:
            await self.set_listener(self._listener)

    async def set_listener(self, listener: Listener) -> None:
        """Sends the table of each pool to this listener, now and after each change."""
        self._listener = listener
        for key, pool in self._pools.items():
            await pool.set_listener(lambda table, key=key: listener(key, table))

    async def watch(self) -> None:
        """Checks the health of all replicas until it is cancelled. Raises RunFailed: a pool has spent its budget."""

        async def one(key: str, pool: ReplicaPool) -> None:
            try:
                await pool.watch()
            except RunFailed as error:
                found = f"its replicas failed too often: {error}"
                raise RunFailed(
                    explain(f"the {key} ({key}.path)", found, "see the log; raise recovery.max_replica_restarts")
                ) from error

        watches = [asyncio.create_task(one(key, pool), name=f"pool {key}") for key, pool in self._pools.items()]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                await finished
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def forget_client(self, client_id: str) -> None:
        """As `ReplicaPool.forget_client`, of every pool."""
        for pool in self._pools.values():
            await pool.forget_client(client_id)

    async def stop(self) -> None:
        """Asks every replica to stop, then kills it."""
        for key, pool in self._pools.items():
            await pool.stop(ENGINES[self._recipe.pools[key][1].engine].stop_timeout_s)

    def _changed(self, key: str, event: Event) -> None:
        if isinstance(event, ReplicaEvent):
            error = str(getattr(event, "error", ""))
            self._on_event(ModelReplicaChanged(key, event.replica, event.kind, error))
