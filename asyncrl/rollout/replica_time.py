"""Time of all replicas together by cause, as the rollouter sees it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from asyncrl.rollout.generation import GenerationClient
from asyncrl.types import ReplicaState, ReplicaTable

ReplicaCause = Literal[
    "generating", "gate_closed", "slots_exhausted", "environment", "evaluation", "asleep", "recovering"
]


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """The activity of all replicas at one moment.

    Attributes:
        serving: replicas that take requests; `busy` of them have some.
        held: replicas that take no new requests because of a publish; `held_busy` of them still have some.
        leased: replicas of an evaluation.
        asleep: replicas that sleep during the trainer's turn, whether or not requests wait at their gates.
        absent: replicas that start, are late or have died.
        working: trajectories without a request: their environment or reward is at work.
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
        """Number of replicas by cause. If any environment or reward works, idle replicas count as waiting for them,
        since they hold back slots and requests. Otherwise the queue admits no more: every admitted group is being
        generated or waits to be trained."""
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
    """Owns the replica seconds by cause since its start."""

    def __init__(self, now: float) -> None:
        self._use, self._since = ReplicaUse(), now
        self._seconds: dict[ReplicaCause, float] = dict.fromkeys(ReplicaUse().replicas, 0.0)

    def observe(self, now: float, use: ReplicaUse) -> Mapping[ReplicaCause, float]:
        """Books the time since the last call under the previous `use`, and keeps this one. Returns the seconds."""
        for cause, count in self._use.replicas.items():
            self._seconds[cause] += count * (now - self._since)
        self._use, self._since = use, now
        return self._seconds


class ReplicaWatch:
    """Books the time of one client's replicas whenever their state changes."""

    def __init__(self) -> None:
        self._time = ReplicaTime(time.monotonic())
        self._client: GenerationClient
        self._states: Counter[ReplicaState] = Counter()
        self._held: frozenset[int] = frozenset()
        self._asleep: frozenset[int] = frozenset()
        self._working = 0
        """Trajectories, and rewards of groups, in progress."""

    def follow(self, client: GenerationClient) -> None:
        """Sets the client, whose `on_change` is `observe`. Called first."""
        self._client = client
        self.observe()

    def begin(self) -> None:
        """Starts counting: the start-up of replicas is not lost time."""
        self._time = ReplicaTime(time.monotonic())
        self.observe()

    def set_replicas(self, table: ReplicaTable) -> None:
        """`table`: the replicas of the client."""
        self._held = frozenset(table.those("held"))
        self._asleep = frozenset(i for i, row in table.those("serving").items() if row.asleep)
        self._states = Counter(row.state for row in table.rows.values())

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks a trajectory or a group as in progress: idle replicas wait for it."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            busy = len(self._client.busy)
            if busy < self._states["serving"] + self._states["held"]:  # else no replica is idle
                self.observe()

    def observe(self) -> Mapping[ReplicaCause, float]:
        """Books the time of the replicas up to now; returns their seconds by cause."""
        client, counted = self._client, self._states
        held_busy = len(client.busy & self._held)
        use = ReplicaUse(
            serving=counted["serving"] - len(self._asleep),
            busy=len(client.busy) - held_busy - len(client.busy & self._asleep),
            held=counted["held"],
            held_busy=held_busy,
            leased=counted["leased"],
            asleep=len(self._asleep),
            absent=counted["starting"] + counted["newcomer"] + counted["suspended"] + counted["dead"],
            working=max(0, self._working - client.in_flight),
        )
        return self._time.observe(time.monotonic(), use)
