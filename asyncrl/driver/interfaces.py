"""What the coordinator drives: the parts of a run as it sees them, built by the composition root."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.driver.publish.checkpoint_engine import CheckpointEngine
from asyncrl.observability.events import EventLog
from asyncrl.observability.metrics_log import MetricsLog
from asyncrl.observability.progress import ProgressView
from asyncrl.types import (
    Committed,
    EvalResult,
    GroupSummary,
    LeaseManifest,
    LeaseWait,
    LedgerCounts,
    PartialGroup,
    ReplicaTable,
    RolloutStats,
    RunServerReport,
)

if TYPE_CHECKING:  # the coordinator is tested without Ray
    from asyncrl.driver.fleet.engine_turns import EngineTurns
    from asyncrl.driver.fleet.model_pools import ModelPools
    from asyncrl.driver.fleet.replica_pool import ReplicaPool
    from asyncrl.driver.fleet.trainer_pool import TrainerPool


class Queue(Protocol):
    """The training side of the message queue."""

    async def foresee(self, step: int, wait_s: float) -> tuple[GroupSummary, ...]: ...
    async def lease(self, step: int, wait_s: float) -> LeaseManifest | LeaseWait: ...
    async def commit(self, step: int, *, leases_next: bool = False) -> Committed: ...
    async def published(self, version: int) -> LedgerCounts: ...
    async def limit_lag(self, limit: int) -> LedgerCounts: ...
    async def wait_idle(self, wait_s: float) -> bool: ...
    async def counts(self) -> LedgerCounts: ...
    async def capture(self, partials: list[PartialGroup]) -> LedgerCounts: ...
    async def save(self, directory: Path, timeout_s: float) -> None: ...
    async def load(self, directory: Path) -> LedgerCounts: ...
    async def ping(self, timeout_s: float) -> float: ...


class RolloutSide(Protocol):
    async def run(self) -> None: ...
    async def evaluate(
        self, name: str, seed: int, timeout_s: float, leased: ReplicaTable | None = None
    ) -> EvalResult: ...
    async def stats(self, timeout_s: float) -> RolloutStats: ...
    async def partials(self, timeout_s: float) -> list[PartialGroup]: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that the coordinator drives, built by the composition root.

    `prompts_digest` names the data. `saw(name, mark)` is told of progress: a mark that differs from the last one.
    `server()` reports on the server of the run, None where there is none. `loops`: by name, what runs as long as a
    coordinator; the error of one ends the run. `engines`: of a run whose engines and ranks share devices.
    """

    queue: Queue
    trainers: TrainerPool
    rollouter: RolloutSide
    replicas: ReplicaPool
    weights: CheckpointEngine
    checkpoints: CheckpointStore
    metrics: MetricsLog
    events: EventLog
    progress: ProgressView
    prompts_digest: str
    saw: Callable[[str, Hashable], None] = lambda name, mark: None
    server: Callable[[], RunServerReport | None] = lambda: None
    pools: ModelPools | None = None
    engines: EngineTurns | None = None
    loops: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=dict)
