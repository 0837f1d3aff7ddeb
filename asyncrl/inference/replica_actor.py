"""Replicas as Ray actors: creation, GPUs, and control by the owner with a deadline on each call."""

from __future__ import annotations

import asyncio
import copy
import functools
import math
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Self

import ray

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError, DeadlineExceeded, explain
from asyncrl.inference.engines import ENGINES, build_engine
from asyncrl.inference.external_places import ExternalLimits
from asyncrl.inference.replica import Replica
from asyncrl.remote.actor_client import ActorClient, ActorHandle
from asyncrl.remote.waits import replica

NOTICE_S = 60.0
"""Time for the pool to stop a replica that got SIGTERM. After it, or at a second SIGTERM, the process exits by
itself."""


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """Where Ray starts the processes of one replica. `strategy`: Ray's scheduling strategy. `ready(timeout_s)`: returns
    when a node has reserved the place, else raises NoPlace."""

    strategy: Any
    ready: Callable[[float], Awaitable[None]]


class ReplicaActor(Replica):
    """A replica in a separate process that treats SIGTERM as a notice: it keeps serving and reports `must_leave`, so
    that its pool moves its requests."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        # Only the main thread may set signal handlers. Ray calls __new__ there, and __init__ in another thread. Ray
        # also creates a stand-in object of this class in the owner's process, which must keep its handlers.
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
    """True in an actor's process."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def replica_gpus(rollout: RolloutConfig) -> float:
    """GPUs per replica when no trainer shares them. The embedded engine gets a fraction of a GPU if replicas outnumber
    GPUs."""
    total = ray.cluster_resources().get("GPU", 0)
    if not total or ENGINES[rollout.engine].elsewhere:
        return 0
    if ENGINES[rollout.engine].takes_whole_gpus:
        return rollout.settings.num_workers * rollout.settings.gpu_share
    return 0 if rollout.torch.device == "cpu" else math.floor(100 / math.ceil(rollout.num_replicas / total)) / 100


def require_gpus(per_replica: float, num_replicas: int) -> None:
    """Checks that the Ray cluster can hold these replicas; actors beyond its capacity would wait forever.

    Args:
        per_replica: GPUs of one replica, all on one node.

    Raises ConfigError: too few GPUs in total, or on every single node.
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
    place: ReplicaPlacement | None = None,
    load_real_weights: bool = False,
) -> ReplicaControl:
    """Creates the process of a replica; the replica is not started.

    Args:
        num_gpus: GPUs that Ray reserves; 0 runs the replica on the CPU.
        environment: variables that the engine needs before it is imported.
        place: None lets Ray choose.
        load_real_weights: serve the model's files immediately; otherwise the gate stays closed until the first publish.
    """
    if rollout.torch.device == "auto":  # where a GPU is reserved, fail rather than silently sample on the CPU
        rollout = replace(rollout, torch=replace(rollout.torch, device="cuda" if num_gpus else "cpu"))
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


class ReplicaControl(ActorClient):
    """The owner's handle of one replica incarnation: `call(timeout_s, Replica.pause, mode)`. A replaced or suspended
    replica gets a new control."""

    def __init__(self, replica_id: int, handle: ActorHandle, place: ReplicaPlacement | None = None) -> None:
        super().__init__(handle, replica(replica_id), is_direct=True)
        self._place = place
        self._abandoned = asyncio.Event()

    async def placed(self, timeout_s: float) -> None:
        """Returns once a node has a place for the process. Raises NoPlace."""
        if self._place is not None:
            await self._place.ready(timeout_s)

    def abandon(self) -> ReplicaControl:
        """Ends every open and later call of this control with DeadlineExceeded. Returns a new control to use when the
        replica answers again. Both share the connection, so calls start in order, and `kill` works on both."""
        later = copy.copy(self)
        later._abandoned = asyncio.Event()
        self._abandoned.set()
        return later

    async def _answer(self, timeout_s: float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._abandoned.is_set():
            raise self._late(name)
        answer = asyncio.ensure_future(super()._answer(timeout_s, name, args, kwargs))
        abandoned = asyncio.ensure_future(self._abandoned.wait())
        try:
            # Whichever is first: the reply, or `abandon`.
            await asyncio.wait((answer, abandoned), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._late(name)
            return answer.result()
        finally:
            abandoned.cancel()
            answer.cancel()

    def _late(self, method: str) -> DeadlineExceeded:
        do = "nothing: it is brought back when it answers again, or replaced"
        return DeadlineExceeded(explain(f"{method} of {self.process}", "it answers too late", do)).of(self.process)
