"""Who serves: the replicas of a run at one moment, as their pool holds them and the rollout side routes by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ReplicaState = Literal["starting", "newcomer", "serving", "held", "leased", "suspended", "dead"]
"""`inference.membership` defines the states and what leads from one to another."""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica.

    `handle` reaches it. `version` is the policy version that it serves; None where nobody had to say. `incarnation`
    changes whenever the replica forgets what it was asked: with a new process, and with a reset. `detail` says why it
    was suspended or replaced, until it serves again.
    """

    handle: Any
    state: ReplicaState
    incarnation: int
    version: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """Every replica by id. `generation` grows with each change: of two tables the later one counts."""

    generation: int = 0
    rows: Mapping[int, ReplicaRow] = field(default_factory=dict)

    def those(self, *states: ReplicaState) -> dict[int, ReplicaRow]:
        """The rows in one of these states."""
        return {i: row for i, row in self.rows.items() if row.state in states}
