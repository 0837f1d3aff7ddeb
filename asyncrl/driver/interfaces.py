"""The parts of a run that the coordinator drives."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.driver.fleet.rollouters import Rollouters
from asyncrl.driver.publish.checkpoint_engine import CheckpointEngine
from asyncrl.observability.events import EventLog
from asyncrl.observability.metrics_log import MetricsLog
from asyncrl.observability.progress import ProgressView
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.remote.actor_client import ActorClient
from asyncrl.types import RunServerReport

if TYPE_CHECKING:  # the coordinator is tested without Ray
    from asyncrl.driver.fleet.engine_turns import EngineTurns
    from asyncrl.driver.fleet.replica_pool import ReplicaPool
    from asyncrl.driver.fleet.trainer_pool import TrainerPool


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run, built by the composition root.

    `queue_writer`: `QueueSpec.writer` of the queue.
    `prompts_digest` identifies the data. `saw(name, mark)` reports progress: a mark different from the last one.
    `server()` reports on the run server; None without one. `loops`: by name, tasks that run as long as a coordinator;
    an error of one ends the run. `engines`: None unless engines and ranks share devices.
    """

    queue: ActorClient[MessageQueue]
    trainers: TrainerPool
    rollouter: Rollouters
    replicas: ReplicaPool
    weights: CheckpointEngine
    checkpoints: CheckpointStore
    metrics: MetricsLog
    events: EventLog
    progress: ProgressView
    prompts_digest: str
    queue_writer: str
    saw: Callable[[str, Hashable], None] = lambda name, mark: None
    server: Callable[[], RunServerReport | None] = lambda: None
    engines: EngineTurns | None = None
    loops: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=dict)
