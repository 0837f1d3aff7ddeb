"""The life of replicas as a state machine. Pure: no clock, no process, no call.

    starting --started--> newcomer --committed--> serving --hold--> held --committed--> serving
                             ^                       |
                             |                       +--lease--> leased --lease_ended--> newcomer
                             +--answered-- suspended <--late-- newcomer, serving, held, leased
    fenced: newcomer, serving, held and leased become newcomers.   failed: every state but leaving becomes dead.
    leave: every state becomes leaving.   Replicas are added and dropped while others work.

* *starting*: its process loads the model.
* *newcomer*: up, behind a closed gate, without committed weights.
* *serving*: gets requests of the rollout. *held*: serves, and a rolling publish is about to reach it; new requests go
  to other replicas, unless all are held.
* *leased*: reserved for an evaluation; publishes skip it, so it keeps its version.
* *suspended*: answered too late; gets nothing until it answers again and has dropped its requests.
* *leaving*: gets no more requests or publishes; its process is stopped, and the replica dropped.
* *dead*: its process is killed. A replacement is a new incarnation under the same id.

`after_failure` decides the consequence of a failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import NoPlace
from asyncrl.remote.failure_policy import FailureAction, RestartBudget, failure_action
from asyncrl.remote.waits import replica
from asyncrl.types import ReplicaState

# The settings of a pool of replicas, and its fixed times.


AWAY_AFTER = 2
"""Further tries to start a replica that never came up, while the others form a quorum."""
ASK_AGAIN_S = 0.2
"""Pause between two health checks of a suspended replica, or between two looks for engines that are awake."""
SLEEP_S = 60.0
"""Longest time for an engine to give its memory back before its process is killed."""
EXIT_S = 30.0
"""Longest time for a killed process to exit, if it holds shared devices or a place to give back."""
LEAVE_S = 20.0
"""Longest time until the rollout side knows of a leaving replica, and a publish to it has ended."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`max_restarts`: replacements within `window_s`. Times are seconds, as in `ray:` and `recovery:`.

    `rejoin_timeout_s`: time for a late replica to answer again; 0 replaces it immediately. `restart_delay_s`: delay
    before the start of a replica whose predecessor failed without having served, doubled with each failure in a row:
    the predecessor's memory and processes may take a while to disappear.
    """

    max_restarts: int
    start_timeout_s: float
    health_interval_s: float
    health_timeout_s: float
    restart_delay_s: float = 1.0
    window_s: float = math.inf
    rejoin_timeout_s: float = 0.0
    quorum: int | None = None
    """Replicas that must come up at the start; None: all."""
    serves_at_once: bool = False
    """Replicas load real weights and serve immediately; no publish follows."""
    stop_timeout_s: float = 10.0
    """Longest time for a leaving replica to stop before its process is killed."""
    is_resized: bool = False
    """`fleet.fleet_size` brings back replicas that left. Otherwise the pool replaces them immediately."""


Event = Literal["started", "committed", "hold", "lease", "lease_ended", "fenced", "late", "answered", "failed", "leave"]

TRANSITIONS: dict[Event, dict[ReplicaState, ReplicaState]] = {
    "started": {"starting": "newcomer"},
    "committed": {"newcomer": "serving", "serving": "serving", "held": "serving"},
    "hold": {"serving": "held", "held": "held", "newcomer": "newcomer"},
    "lease": {"serving": "leased"},
    "lease_ended": {"leased": "newcomer"},
    "fenced": {"newcomer": "newcomer", "serving": "newcomer", "held": "newcomer", "leased": "newcomer"},
    "late": {"newcomer": "suspended", "serving": "suspended", "held": "suspended", "leased": "suspended"},
    "answered": {"suspended": "newcomer"},
    "failed": dict.fromkeys(("starting", "newcomer", "serving", "held", "leased", "suspended"), "dead"),
    "leave": dict.fromkeys(("starting", "newcomer", "serving", "held", "leased", "suspended", "dead"), "leaving"),
}
"""Event -> {state in which it may occur: next state}."""

FORGETS: tuple[Event, ...] = ("answered", "lease_ended", "fenced")
"""Events at which the replica drops its requests and becomes a new incarnation."""


@dataclass(slots=True)
class Member:
    """One replica. `failures`: consecutive earlier incarnations that failed without having served."""

    state: ReplicaState = "starting"
    incarnation: int = 0
    version: int | None = None
    served: bool = False
    failures: int = 0


Followup = Literal["suspend", "leave", "replace", "stay_away"]


def after_failure(
    replica_id: int, member: Member, why: BaseException | str, *, others_up: int, settings: PoolSettings
) -> Followup:
    """The consequence of a replica's failure. `why`: an error, or a description of the misbehaviour.

    * suspend: it was late, and gets time to answer again.
    * leave: no node has a place for it, and others are up. `fleet_size` brings it back when a node has room.
    * stay_away: it never came up, and a quorum is up: another try would spend the others' budget.
    * replace: kill its process and start another, if the budget allows.
    """
    may_rejoin = settings.rejoin_timeout_s > 0 and member.state in TRANSITIONS["late"]
    action = failure_action(replica(replica_id), why, restarts_left=True, may_rejoin=may_rejoin)
    if action is FailureAction.SUSPEND_REPLICA:
        return "suspend"
    if isinstance(why, NoPlace) and settings.is_resized and others_up:
        return "leave"
    has_quorum = settings.quorum is not None and others_up >= settings.quorum
    return "stay_away" if has_quorum and not member.served and member.failures >= AWAY_AFTER else "replace"


class Membership:
    """The state of every replica, and whether a failed replica may be replaced.

    `generation` grows with every change.
    """

    def __init__(self, replica_ids: Iterable[int], budget: RestartBudget, *, restart_delay_s: float) -> None:
        """
        Args:
            budget: counts replacements.
            restart_delay_s: delay before the replacement of a replica that never served; doubled with each such failure
                in a row.
        """
        self.members = {i: Member() for i in replica_ids}
        self._dropped: dict[int, int] = {}
        """Last incarnation of each dropped replica; the next one under the same id continues the count."""
        self.budget = budget
        self.generation = 0
        self._restart_delay_s = restart_delay_s

    def those(self, *states: ReplicaState) -> list[int]:
        """The replicas in one of these states."""
        return [i for i, member in self.members.items() if member.state in states]

    def may(self, replica_id: int, event: Event) -> bool:
        return self.members[replica_id].state in TRANSITIONS[event]

    def apply(self, replica_id: int, event: Event, version: int | None = None) -> None:
        """`version`: version served after a commit; None keeps the present one.

        Raises ValueError if the event is not allowed in this state.
        """
        member = self.members[replica_id]
        if member.state not in TRANSITIONS[event]:
            raise ValueError(f"replica {replica_id} is {member.state}: {event} cannot come now")
        before = (member.state, member.incarnation, member.version)
        member.state = TRANSITIONS[event][member.state]
        member.incarnation += event in FORGETS
        member.served = member.served or member.state == "serving"
        # Only replicas with committed weights have a version.
        if member.state not in ("serving", "held", "leased"):
            member.version = None
        elif version is not None:
            member.version = version
        self.generation += (member.state, member.incarnation, member.version) != before

    def require_free(self, replica_id: int) -> None:
        """Raises ValueError if the replica exists."""
        if replica_id in self.members:
            raise ValueError(f"replica {replica_id} is there, {self.members[replica_id].state}")

    def add(self, replica_id: int) -> None:
        """A replica joins, as starting. Raises ValueError if it exists."""
        self.require_free(replica_id)
        self.members[replica_id] = Member(incarnation=self._dropped.get(replica_id, -1) + 1)
        self.generation += 1

    def drop(self, replica_id: int) -> None:
        """Removes a leaving or dead replica. Raises ValueError in any other state."""
        member = self.members[replica_id]
        if member.state not in ("leaving", "dead"):
            raise ValueError(f"replica {replica_id} is {member.state}: it has to leave first")
        self._dropped[replica_id] = member.incarnation
        del self.members[replica_id]
        self.generation += 1

    def replace(self, replica_id: int) -> float | None:
        """Begins the next incarnation of a dead replica; returns the seconds to wait before its start. None: the budget
        is spent, and the replica stays dead."""
        dead = self.members[replica_id]
        assert dead.state == "dead", dead
        if not self.budget.take():
            return None
        failures = 0 if dead.served else dead.failures + 1
        self.members[replica_id] = Member(incarnation=dead.incarnation + 1, failures=failures)
        self.generation += 1
        return self._restart_delay_s * 2 ** (failures - 1) if failures else 0.0
