"""The replica table: all replicas at one moment. The pool makes it, and the rollout side routes requests by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

ReplicaState = Literal["starting", "newcomer", "serving", "held", "leased", "suspended", "leaving", "dead"]
"""The states; `driver.fleet.membership` defines the transitions."""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica.

    `handle` makes calls to it. `version`: the policy version that it serves; None if all have the same. `incarnation`
    changes when the replica drops its requests (new process, reset). `detail`: why it was suspended or replaced, until
    it serves again. `asleep`: its engine has released its memory for the trainer's turn; requests wait at its gate.
    """

    handle: Any
    state: ReplicaState
    incarnation: int
    version: int | None = None
    detail: str = ""
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The present and the wanted replicas of a run.

    Attributes: target: the wanted number.
        least: replicas whose places are reserved for the whole run.
        most: the largest target.
        states: of the present replicas, by id.
        waiting: id of a replica without a place -> the finding of the last attempt; empty before it.
    """

    target: int
    least: int
    most: int
    states: Mapping[int, ReplicaState]
    waiting: Mapping[int, str]

    @property
    def is_reached(self) -> bool:
        """True if exactly the wanted number of replicas serves and there are no others."""
        up = [state for state in self.states.values() if state in ("serving", "held", "leased")]
        return len(up) == len(self.states) == self.target


@dataclass(frozen=True, slots=True)
class RunServerStats:
    """The server of a run. `address`: its URL without /v1; clients' requests with a token (`running`), without one
    (`waiting`), and refused with 429 or 503 since its start (`refused`)."""

    address: str
    running: int
    waiting: int
    refused: int


@dataclass(frozen=True, slots=True)
class RunServerReport:
    """The servers of a run so far. `up`: one answers now, with `running` and `waiting`; `refused` and `restarts` count
    over all."""

    up: bool
    running: int
    waiting: int
    refused: int
    restarts: int


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """Every replica by id. `generation` grows with each change; the larger one wins."""

    generation: int = 0
    rows: Mapping[int, ReplicaRow] = field(default_factory=dict)

    def those(self, *states: ReplicaState) -> dict[int, ReplicaRow]:
        """The rows in one of these states."""
        return {i: row for i, row in self.rows.items() if row.state in states}

    def only(self, ids: Collection[int]) -> ReplicaTable:
        """The same table with these rows."""
        return replace(self, rows={i: row for i, row in self.rows.items() if i in ids})

    def part(self, index: int, count: int) -> frozenset[int]:
        """The replicas of the `index`-th of `count` rollouters: every `count`-th, or all while none of its own takes
        requests."""
        own = frozenset(i for i in self.rows if i % count == index)
        return own if own & self.those("serving", "held").keys() else frozenset(self.rows)
