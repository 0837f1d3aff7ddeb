"""The replica table: all replicas at one moment. The pool makes it, and the rollout side routes requests by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from asyncrl.types.generation import PauseMode, ReplicaStats
from asyncrl.types.weights import Digest, Manifest, TransferSource

ReplicaState = Literal["starting", "newcomer", "serving", "held", "leased", "suspended", "leaving", "dead"]
"""`inference.membership` defines the states and what leads from one to another."""


class ReplicaHandle(Protocol):
    """Reaches one replica for its owner: `inference.replica_actor.ReplicaControl`. A replaced or suspended replica gets
    another handle, so a handle also says which incarnation is meant.

    Every call raises ProcessDied when the process has died and DeadlineExceeded when it does not answer.
    """

    async def placed(self, timeout_s: float) -> None:
        """Returns when a node has a place for the process. Raises NoPlace."""
        ...

    async def start(self, timeout_s: float) -> ReplicaStats: ...
    async def pause(self, mode: PauseMode, timeout_s: float) -> None: ...
    async def receive_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None: ...
    async def commit(self, publish_id: int, version: int | None, digest: Digest | None, timeout_s: float) -> None: ...
    async def adopt(
        self, publish_id: int, version: int | None, digest: Digest | None, mode: PauseMode, timeout_s: float
    ) -> float:
        """As `Replica.adopt`."""
        ...

    async def stats(self, timeout_s: float) -> ReplicaStats: ...
    async def reset(self, timeout_s: float, incarnation: int) -> None: ...
    async def forget_client(self, client_id: str, timeout_s: float) -> None: ...
    async def sleep(self, timeout_s: float) -> None: ...
    async def stop(self, timeout_s: float) -> None: ...
    def abandon(self) -> ReplicaHandle:
        """Ends every call in progress, and every later one, with DeadlineExceeded. Returns a handle to go on with when
        the replica answers again."""
        ...

    def kill(self) -> None: ...
    async def ended(self, timeout_s: float) -> None:
        """Returns when the killed process has exited."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica.

    `handle` makes calls to it. `version` is the policy version that it serves; None where all have the same.
    `incarnation` changes whenever the replica drops its requests: with a new process, and with a reset. `detail` says
    why it was suspended or replaced, until it serves again. `asleep`: its engine has given its memory back for the
    trainer's turn; requests wait at its gate.
    """

    handle: Any
    state: ReplicaState
    incarnation: int
    version: int | None = None
    detail: str = ""
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class FleetReport:
    """How many replicas a run has and wants.

    Attributes:
        target: the number that it wants.
        least: replicas whose places are reserved for the whole run.
        most: the largest target that it takes; None: any.
        states: of the replicas that it has, by id.
        waiting: ids of replicas that no node has room for yet -> what was found at the last look; empty before it.
    """

    target: int
    least: int
    most: int | None
    states: Mapping[int, ReplicaState]
    waiting: Mapping[int, str]

    @property
    def is_reached(self) -> bool:
        """True when as many replicas serve as the run wants, and no other is there."""
        up = [state for state in self.states.values() if state in ("serving", "held", "leased")]
        return len(up) == len(self.states) == self.target


@dataclass(frozen=True, slots=True)
class RunServerStats:
    """The server of a run. `address`: its URL without /v1; requests of clients whose answer has begun (`running`), that
    have no token yet (`waiting`), and that were sent away for later since its start (`refused`)."""

    address: str
    running: int
    waiting: int
    refused: int


@dataclass(frozen=True, slots=True)
class RunServerReport:
    """The servers of a run so far. `up`: one answers now, and has `running` and `waiting`; `refused` and `restarts`
    count over all of them."""

    up: bool
    running: int
    waiting: int
    refused: int
    restarts: int


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """Every replica by id. `generation` grows with each change: of two tables the later one counts."""

    generation: int = 0
    rows: Mapping[int, ReplicaRow] = field(default_factory=dict)

    def those(self, *states: ReplicaState) -> dict[int, ReplicaRow]:
        """The rows in one of these states."""
        return {i: row for i, row in self.rows.items() if row.state in states}

    def only(self, ids: Collection[int]) -> ReplicaTable:
        """The same table with these rows."""
        return replace(self, rows={i: row for i, row in self.rows.items() if i in ids})

    def part(self, index: int, count: int) -> frozenset[int]:
        """The replicas that the `index`-th of `count` rollouters works with: every `count`-th of them, or all while
        none of these takes requests."""
        own = frozenset(i for i in self.rows if i % count == index)
        return own if own & self.those("serving", "held").keys() else frozenset(self.rows)
