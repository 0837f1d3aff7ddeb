"""Time of all replicas together by cause, as the rollouter sees it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ReplicaCause = Literal[
    "generating", "gate_closed", "slots_exhausted", "environment", "evaluation", "asleep", "recovering"
]


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """What the replicas do at one moment.

    Attributes:
        serving: replicas that take requests; `busy` of them have some.
        held: replicas that take no new ones because of a publish; `held_busy` of them still have some.
        leased: replicas of an evaluation.
        asleep: replicas that sleep in the trainer's turn, whether or not requests wait at their gates.
        absent: replicas that start, are late or have died.
        working: trajectories that have no request: their environment or reward works.
    """

    serving: int = 0
    busy: int = 0
    held: int = 0
    held_busy: int = 0
    leased: int = 0
    asleep: int = 0
    absent: int = 0
    working: int = 0

    @property
    def replicas(self) -> dict[ReplicaCause, int]:
        """How many replicas each cause has. Replicas without a request wait for environments and rewards if any works:
        these keep slots and requests back. Otherwise every admitted group is being generated or waits to be trained,
        and the queue admits no more."""
        idle = self.serving - self.busy
        return {
            "generating": self.busy + self.held_busy,
            "gate_closed": self.held - self.held_busy,
            "environment": idle if self.working else 0,
            "slots_exhausted": 0 if self.working else idle,
            "evaluation": self.leased,
            "asleep": self.asleep,
            "recovering": self.absent,
        }


class ReplicaTime:
    """Owns the replica seconds of each cause since its start."""

    def __init__(self, now: float) -> None:
        self._use, self._since = ReplicaUse(), now
        self._seconds: dict[ReplicaCause, float] = dict.fromkeys(ReplicaUse().replicas, 0.0)

    def observe(self, now: float, use: ReplicaUse) -> Mapping[ReplicaCause, float]:
        """Books the time since the last call to what was seen then; `use` is what is seen now. Returns the seconds."""
        for cause, count in self._use.replicas.items():
            self._seconds[cause] += count * (now - self._since)
        self._use, self._since = use, now
        return self._seconds
