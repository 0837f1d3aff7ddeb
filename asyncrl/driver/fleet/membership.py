"""The life of replicas as a state machine. Pure: no clock, no process, no call.

    starting --started--> newcomer --committed--> serving --hold--> held --committed--> serving
                             ^                       |
                             |                       +--lease--> leased --lease_ended--> newcomer
                             +--answered-- suspended <--late-- newcomer, serving, held, leased
    fenced: newcomer, serving, held and leased become newcomers.   failed: every state but leaving becomes dead.
    leave: every state becomes leaving.   Replicas are added and dropped while others work.

* *starting*: its process loads the model.
* *newcomer*: it is up, behind a closed gate; no weights have been committed on it.
* *serving*: requests of the rollout reach it. *held*: it serves, and a rolling publish is about to reach it: new
  requests go to other replicas, unless all are held.
* *leased*: an evaluation has it for itself; publishes leave it out, so that it stays at its version.
* *suspended*: it answered too late; nothing reaches it until it answers again and has dropped its requests.
* *leaving*: it gets no requests and no publish any more; its process is stopped, and the replica dropped.
* *dead*: its process is killed. A replacement is another incarnation under the same id.

`after_failure` decides what a failure leads to.
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
"""Further tries to start a replica that never came up, while others are a quorum."""
ASK_AGAIN_S = 0.2
"""Pause between two health checks of a suspended replica, or between two looks for engines that are awake."""
SLEEP_S = 60.0
"""Longest time that an engine may take to give its memory back before its process is killed."""
EXIT_S = 30.0
"""Longest time for a killed process to exit, where its devices are shared or its place is given back."""
LEAVE_S = 20.0
"""Longest time for the rollout side to hear of a replica that leaves, and for a publish to it to end."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`max_restarts`: replacements within `window_s`; times are seconds, meant as in `ray:` and `recovery:`.

    `rejoin_timeout_s`: how long a late replica may take to answer again; 0 replaces it at once. `restart_delay_s`:
    delay before the start of a replica whose predecessor failed without having served, doubled with each failure in a
    row. The memory and the processes of the predecessor may take a while to disappear.
    """

    max_restarts: int
    start_timeout_s: float
    health_interval_s: float
    health_timeout_s: float
    restart_delay_s: float = 1.0
    window_s: float = math.inf
    rejoin_timeout_s: float = 0.0
    quorum: int | None = None
    """Replicas that have to come up at the start; None: all."""
    serves_at_once: bool = False
    """Replicas load real weights and serve from their start; no publish follows."""
    stop_timeout_s: float = 10.0
    """Longest time for one that leaves to stop before its process is killed."""
    is_resized: bool = False
    """`inference.fleet_size` brings back replicas that left. Otherwise the pool replaces them at once."""


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
"""Event -> the states in which it may occur, each with the state that follows."""

FORGETS: tuple[Event, ...] = ("answered", "lease_ended", "fenced")
"""Events at which the replica drops its requests and becomes another incarnation."""


@dataclass(slots=True)
class Member:
    """One replica. `failures`: incarnations before this one that failed in a row without having served."""

    state: ReplicaState = "starting"
    incarnation: int = 0
    version: int | None = None
    served: bool = False
    failures: int = 0


Followup = Literal["suspend", "leave", "replace", "stay_away"]


def after_failure(
    replica_id: int, member: Member, why: BaseException | str, *, others_up: int, settings: PoolSettings
) -> Followup:
    """What becomes of a replica that failed because of `why`, an error or what it did wrong.

    * suspend: it was late, and gets time to answer again.
    * leave: no node has a place for it, and others are up. `fleet_size` brings it back when a node has room.
    * stay_away: it never came up, and a quorum is up: another try would spend the budget of the others.
    * replace: its process is killed, and another one started, if the budget allows one.
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
    """The state of every replica, and whether one that failed may be replaced.

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
        """Incarnation of those that were dropped: the next one under the same id is another."""
        self.budget = budget
        self.generation = 0
        self._restart_delay_s = restart_delay_s

    def those(self, *states: ReplicaState) -> list[int]:
        """The replicas in one of these states."""
        return [i for i, member in self.members.items() if member.state in states]

    def may(self, replica_id: int, event: Event) -> bool:
        return self.members[replica_id].state in TRANSITIONS[event]

    def apply(self, replica_id: int, event: Event, version: int | None = None) -> None:
        """`version`: what a replica serves from a commit on; None leaves what it had.

        Raises ValueError: the event cannot come in this state.
        """
        member = self.members[replica_id]
        if member.state not in TRANSITIONS[event]:
            raise ValueError(f"replica {replica_id} is {member.state}: {event} cannot come now")
        before = (member.state, member.incarnation, member.version)
        member.state = TRANSITIONS[event][member.state]
        member.incarnation += event in FORGETS
        member.served = member.served or member.state == "serving"
        if member.state not in ("serving", "held", "leased"):
            member.version = None
        elif version is not None:
            member.version = version
        self.generation += (member.state, member.incarnation, member.version) != before

    def require_free(self, replica_id: int) -> None:
        """Raises ValueError: it is there."""
        if replica_id in self.members:
            raise ValueError(f"replica {replica_id} is there, {self.members[replica_id].state}")

    def add(self, replica_id: int) -> None:
        """A replica joins, as starting. Raises ValueError: it is there."""
        self.require_free(replica_id)
        self.members[replica_id] = Member(incarnation=self._dropped.get(replica_id, -1) + 1)
        self.generation += 1

    def drop(self, replica_id: int) -> None:
        """One that is leaving or dead is gone. Raises ValueError: it is in another state."""
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
