"""Replicas as Ray actors: how one is made, and how its owner reaches it with a deadline on each call."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import ray

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.inference import build_engine
from asyncrl.inference.replica import Replica, ReplicaStats
from asyncrl.remote import reply
from asyncrl.types import Manifest, PauseMode
from asyncrl.weights.transport import Digest, TransferSource

GRACE_S = 5.0
"""What a call may take beyond the deadline that the replica itself keeps, so that its own error arrives."""


def spawn_replica(
    rollout: RolloutConfig,
    model: ModelConfig,
    replica_id: int,
    *,
    num_gpus: float,
    environment: Mapping[str, str],
    load_real_weights: bool = False,
) -> ReplicaControl:
    """A new process for a replica, not started.

    Args:
        num_gpus: what Ray reserves for it; 0 runs it on the CPU.
        environment: variables that the engine needs before it is imported.
        load_real_weights: it serves the model's files at once; otherwise its gate waits for the first publish.
    """
    build = functools.partial(build_engine, rollout, model, load_real_weights=load_real_weights)
    handle = (
        ray.remote(Replica)
        .options(
            num_cpus=0,
            num_gpus=num_gpus,
            max_concurrency=1000,
            runtime_env={"env_vars": dict(environment)} if environment else None,
        )
        .remote(replica_id, build, gate_timeout_s=rollout.gate_timeout_s, serves_at_once=load_real_weights)
    )
    return ReplicaControl(replica_id, handle)


class ReplicaControl:
    """The control plane of one replica over its Ray actor handle."""

    def __init__(self, replica_id: int, handle: Any) -> None:
        self.handle = handle
        self.name = f"replica {replica_id}"

    async def start(self, timeout_s: float) -> ReplicaStats:
        return await self._call("start", timeout_s)

    async def pause(self, mode: PauseMode, timeout_s: float) -> None:
        await self._call("pause", timeout_s, mode)

    async def receive_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        return await self._call("receive_weights", timeout_s + GRACE_S, manifest, source, timeout_s)

    async def commit(self, publish_id: int, version: int | None, digest: Digest | None, timeout_s: float) -> None:
        await self._call("commit", timeout_s, publish_id, version, digest)

    async def stats(self, timeout_s: float) -> ReplicaStats:
        return await self._call("stats", timeout_s)

    async def stop(self, timeout_s: float) -> None:
        await self._call("stop", timeout_s)

    def kill(self) -> None:
        """Ends the process, also a stopped one; its children go with it."""
        ray.kill(self.handle)

    async def _call(self, method: str, timeout_s: float, *args: Any) -> Any:
        call = getattr(self.handle, method).remote(*args)
        return await reply(call, timeout_s=timeout_s, what=f"{method} of {self.name}")
