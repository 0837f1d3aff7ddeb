"""What the coordinator drives: the parts of a run as it sees them, built by the composition root."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.checkpoint.digests import FileDigest
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.driver.publish.checkpoint_engine import CheckpointEngine
from asyncrl.driver.rollouters import Rollouters
from asyncrl.observability.events import EventLog
from asyncrl.observability.metrics_log import MetricsLog
from asyncrl.observability.progress import ProgressView
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.remote.actor_client import ActorClient
from asyncrl.types import (
    RankPlan,
    ReplicaHandle,
    ReplicaStats,
    ReplicaTable,
    RunServerReport,
    TrainMetrics,
    TrajectoryKey,
)


class Trainers(Protocol):
    async def fetch_ahead(self, plans: tuple[RankPlan, ...]) -> None: ...
    async def train_step(self, plans: tuple[RankPlan, ...]) -> TrainMetrics: ...
    async def reference_kl(self, plans: tuple[RankPlan, ...]) -> dict[TrajectoryKey, float]: ...
    async def snapshot_weights(self) -> None: ...
    async def capture(self) -> None: ...
    async def save(self, path: Path, timeout_s: float) -> Mapping[str, FileDigest]: ...
    async def load(self, path: Path) -> None: ...
    async def ping(self, timeout_s: float) -> float: ...


class Replicas(Protocol):
    """The replicas of the run: `inference.replica_pool.ReplicaPool`."""

    @property
    def newcomers(self) -> Mapping[int, ReplicaHandle]: ...
    @property
    def leased(self) -> Mapping[int, ReplicaHandle]: ...
    @property
    def serving(self) -> Mapping[int, ReplicaHandle]: ...
    @property
    def table(self) -> ReplicaTable: ...
    async def lease(self, count: int) -> Mapping[int, ReplicaHandle]: ...
    async def end_lease(self, controls: Mapping[int, ReplicaHandle]) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def stats(self) -> list[ReplicaStats]: ...
    async def watch(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that the coordinator drives, built by the composition root.

    `prompts_digest` names the data. `saw(name, mark)` is told of progress: a mark that differs from the last one.
    `server()` reports on the server of the run, None where there is none. `loops`: by name, what runs as long as a
    coordinator; the error of one ends the run.
    """

    queue: ActorClient[MessageQueue]
    trainers: Trainers
    rollouter: Rollouters
    replicas: Replicas
    weights: CheckpointEngine
    checkpoints: CheckpointStore
    metrics: MetricsLog
    events: EventLog
    progress: ProgressView
    prompts_digest: str
    saw: Callable[[str, Hashable], None] = lambda name, mark: None
    server: Callable[[], RunServerReport | None] = lambda: None
    loops: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=dict)
