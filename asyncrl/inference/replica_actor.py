"""Replicas as Ray actors: how one is made, and how its owner reaches it with a deadline on each call."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import ray

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError, DeadlineExceeded, explain
from asyncrl.inference.engines import ENGINES, build_engine
from asyncrl.inference.external_places import ExternalLimits
from asyncrl.inference.replica import Replica
from asyncrl.remote.actor_client import ActorClient, ActorHandle
from asyncrl.remote.waits import replica
from asyncrl.types import Digest, Manifest, PauseMode, ReplicaStats, TransferSource

P = ParamSpec("P")
T = TypeVar("T")

GRACE_S = 5.0
"""Time that a call has beyond the replica's own deadline, so that the replica's error arrives."""
NOTICE_S = 60.0
"""Time in which a replica that was asked to end is stopped by its pool. After it, and at a second SIGTERM, its process
ends by itself."""


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where Ray starts the processes of one replica. `strategy`: Ray's scheduling strategy. `ready`: returns within so
    many seconds when a node has the place, else raises NoPlace."""

    strategy: Any
    ready: Callable[[float], Awaitable[None]]


class ReplicaActor(Replica):
    """A replica in a process of its own, where SIGTERM is a notice: the replica serves on, and its statistics say that
    it must leave, so that its pool sends its requests elsewhere."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        # Ray makes the object in the main thread, the only one that may set handlers, and calls __init__ in another. In
        # the process that owns the actor it makes another object of this class, which stands for the actor.
        if threading.current_thread() is threading.main_thread() and _is_actor():
            made._take_notice()
        return made

    def _take_notice(self) -> None:
        former = signal.getsignal(signal.SIGTERM)

        def notice(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGTERM, former or signal.SIG_DFL)
            self.must_leave = True
            end = threading.Timer(NOTICE_S, os._exit, (128 + number,))
            end.daemon = True
            end.start()

        signal.signal(signal.SIGTERM, notice)


def _is_actor() -> bool:
    """True in the process of an actor."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def replica_gpus(rollout: RolloutConfig) -> float:
    """GPUs of one replica where replicas have those of the cluster for themselves: a part of one where the engine may
    take one and there are fewer GPUs than replicas."""
    total = ray.cluster_resources().get("GPU", 0)
    if not total or ENGINES[rollout.engine].elsewhere:
        return 0
    if ENGINES[rollout.engine].takes_whole_gpus:
        return rollout.settings.num_workers * rollout.settings.gpu_share
    return 0 if rollout.torch.device == "cpu" else math.floor(100 / math.ceil(rollout.num_replicas / total)) / 100


def require_gpus(per_replica: float, num_replicas: int) -> None:
    """Returns when the cluster that Ray has joined can hold these replicas; actors beyond that would wait forever.

    Args:
        per_replica: GPUs of one replica, all on one node; 0 asks for none.

    Raises ConfigError: there are fewer GPUs, or no node has enough for one replica.
    """
    asked = f"{num_replicas} replicas with {per_replica:g} GPUs each"
    total = ray.cluster_resources().get("GPU", 0)
    needed = per_replica * num_replicas
    if needed > total + 1e-6:
        do = "ask for fewer replicas or smaller ones, or add nodes to the cluster"
        raise ConfigError(explain(asked, f"that is {needed:g} GPUs, Ray's cluster has {total:g}", do))
    largest = max((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if per_replica > largest:
        found = f"a replica lives on one node, and the largest has {largest:g} GPUs"
        raise ConfigError(explain(asked, found, f"set tensor_parallel_size of its engine to {largest:g} or less"))


def spawn_replica(
    rollout: RolloutConfig,
    model: ModelConfig,
    replica_id: int,
    *,
    num_gpus: float,
    environment: Mapping[str, str],
    place: ReplicaPlace | None = None,
    load_real_weights: bool = False,
) -> ReplicaControl:
    """A new process for a replica, not started.

    Args:
        num_gpus: GPUs that Ray reserves for it; 0 runs it on the CPU.
        environment: variables that the engine needs before it is imported.
        place: None leaves it to Ray.
        load_real_weights: it serves the model's files at once; otherwise its gate waits for the first publish.
    """
    if num_gpus and rollout.torch.device == "auto":  # its GPU is there: it may not sample on its CPU unnoticed
        rollout = replace(rollout, torch=replace(rollout.torch, device="cuda"))
    build = functools.partial(build_engine, rollout.of_replica(replica_id), model, load_real_weights=load_real_weights)
    serve, limits = rollout.serve, None
    if serve.enabled:
        limits = ExternalLimits.of(rollout.settings.decodes_at_once, serve.share, serve.request_timeout_s)
    handle = (
        ray.remote(ReplicaActor)
        .options(
            num_cpus=0,
            num_gpus=num_gpus,
            max_concurrency=1000,
            scheduling_strategy="DEFAULT" if place is None else place.strategy,
            runtime_env={"env_vars": dict(environment)} if environment else None,
        )
        .remote(
            replica_id,
            build,
            gate_timeout_s=rollout.gate_timeout_s,
            serves_at_once=load_real_weights,
            node=ray.util.get_node_ip_address,
            external=limits,
        )
    )
    return ReplicaControl(replica_id, handle, place)


class ReplicaControl:
    """The calls of the pool and the checkpoint engine to one replica."""

    def __init__(
        self, replica_id: int, handle: ActorHandle, place: ReplicaPlace | None = None, actor: ActorClient | None = None
    ) -> None:
        """`actor`: what a former control called it by; calls of both begin in their order."""
        self._id = replica_id
        self.handle = handle
        self._place = place
        self._actor = ActorClient(handle, replica(replica_id), has_line=True) if actor is None else actor
        self._abandoned = False
        self._open: set[asyncio.Future[None]] = set()

    async def placed(self, timeout_s: float) -> None:
        """Returns when a node has a place for the process. Raises NoPlace."""
        if self._place is not None:
            await self._place.ready(timeout_s)

    async def start(self, timeout_s: float) -> ReplicaStats:
        return await self._call(timeout_s, Replica.start)

    async def pause(self, mode: PauseMode, timeout_s: float) -> None:
        await self._call(timeout_s, Replica.pause, mode)

    async def receive_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        return await self._call(timeout_s + GRACE_S, Replica.receive_weights, manifest, source, timeout_s)

    async def commit(self, publish_id: int, version: int | None, digest: Digest | None, timeout_s: float) -> None:
        await self._call(timeout_s, Replica.commit, publish_id, version, digest)

    async def adopt(
        self, publish_id: int, version: int | None, digest: Digest | None, mode: PauseMode, timeout_s: float
    ) -> float:
        return await self._call(timeout_s + GRACE_S, Replica.adopt, publish_id, version, digest, mode, timeout_s)

    async def stats(self, timeout_s: float) -> ReplicaStats:
        return await self._call(timeout_s, Replica.stats)

    async def reset(self, timeout_s: float, incarnation: int) -> None:
        """As `Replica.reset`. Raises DeadlineExceeded, ProcessDied."""
        await self._call(timeout_s + GRACE_S, Replica.reset, timeout_s, incarnation)

    async def forget_client(self, client_id: str, timeout_s: float) -> None:
        await self._call(timeout_s, Replica.forget_client, client_id)

    async def sleep(self, timeout_s: float) -> None:
        await self._call(timeout_s, Replica.sleep)

    async def stop(self, timeout_s: float) -> None:
        await self._call(timeout_s, Replica.stop)

    def abandon(self) -> ReplicaControl:
        """Ends every call in progress, and every later one, with DeadlineExceeded. Returns a new control for the time
        when the replica answers again; `kill` works on both."""
        self._abandoned = True
        for ended in self._open:
            if not ended.done():
                ended.set_result(None)
        return ReplicaControl(self._id, self.handle, self._place, self._actor)

    def kill(self) -> None:
        self._actor.kill()

    async def ended(self, timeout_s: float) -> None:
        """Returns when the killed process has exited. Raises DeadlineExceeded."""
        await self._actor.ended(timeout_s, Replica.ping)

    async def _call(
        self, timeout_s: float, method: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if self._abandoned:
            raise self._late(method.__name__)
        answer = asyncio.ensure_future(self._actor.call(timeout_s, method, *args, **kwargs))
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open.add(ended)
        try:
            await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._late(method.__name__)
            return answer.result()
        finally:
            self._open.discard(ended)
            answer.cancel()

    def _late(self, method: str) -> DeadlineExceeded:
        process = self._actor.process
        do = "nothing: it is brought back when it answers again, or replaced"
        return DeadlineExceeded(explain(f"{method} of {process}", "it answers too late", do)).of(process)
