"""Replicas without a trainer, which serve the model's files immediately: for `asyncrl-serve`, `asyncrl-eval`, and the
other models of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.config.run import RecoveryConfig
from asyncrl.driver.fleet.membership import PoolSettings
from asyncrl.driver.fleet.replica_pool import ReplicaPool
from asyncrl.inference.replica_actor import ReplicaControl, replica_gpus, require_gpus, spawn_replica
from asyncrl.types.events import Event

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 30.0
"""A replica that does not answer for this long counts as dead."""
HEALTH_INTERVAL_S = 5.0


def _log(event: Event) -> None:
    logger.info("%s", event)


def standalone_pool(
    model: ModelConfig,
    rollout: RolloutConfig,
    recovery: RecoveryConfig,
    *,
    environment: Mapping[str, str],
    start_timeout_s: float,
    gpus: float | None = None,
    on_event: Callable[[Event], None] = _log,
) -> ReplicaPool:
    """A pool of replicas, not started.

    Args:
        gpus: of one replica, if the caller has divided the GPUs among all processes of a run; None: the replicas have
            the cluster to themselves.

    Raises ConfigError if there are too few GPUs.
    """
    if gpus is None:
        gpus = replica_gpus(rollout)
        require_gpus(gpus, rollout.num_replicas)
    settings = PoolSettings(
        recovery.replica_restarts(rollout.num_replicas),
        start_timeout_s=start_timeout_s,
        health_interval_s=HEALTH_INTERVAL_S,
        health_timeout_s=HEALTH_TIMEOUT_S,
        window_s=recovery.window_s,
        quorum=rollout.start_quorum,
        serves_at_once=True,
    )

    def spawn(replica_id: int) -> ReplicaControl:
        return spawn_replica(rollout, model, replica_id, num_gpus=gpus, environment=environment, load_real_weights=True)

    return ReplicaPool(spawn, rollout.num_replicas, settings, on_event=on_event)
