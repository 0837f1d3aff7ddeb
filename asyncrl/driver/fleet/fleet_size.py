"""Brings the number of replicas to its target while the run goes on.

The places of the first `least` replicas are reserved for the whole run. Each further replica has its own place, taken
when it joins and given back when it has left.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from asyncrl.config.rollout import MOST_REPLICAS
from asyncrl.errors import ConfigError, NoPlace, explain
from asyncrl.remote.tasks import cancel, wait_event
from asyncrl.types import FleetReport, ReplicaState, events

if TYPE_CHECKING:
    from asyncrl.driver.cluster.placement_groups import PlacementGroups
    from asyncrl.driver.fleet.replica_pool import ReplicaPool

logger = logging.getLogger(__name__)

MOST_WAITS = 64
"""Replicas that wait for a place at the same time: each wait costs Ray and the driver time. The next one begins when
another has found its place."""
LOOK_S = 1.0
"""Pause between two looks at the table and the nodes."""
SPARED: tuple[ReplicaState, ...] = ("dead", "starting", "suspended", "newcomer", "serving", "held", "leased")
"""Order in which replicas leave when fewer are wanted: least useful to the run first."""


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """`least`: replicas whose places are reserved for the whole run. `most`: None allows any number. `fixed_by`: the
    setting that fixes the number at `least`; empty if there is none. At most MOST_REPLICAS in any case."""

    least: int
    most: int | None = None
    fixed_by: str = ""

    def require(self, replicas: int) -> None:
        """Raises ConfigError if the run cannot have this many replicas."""
        asked = f"{replicas} replicas"
        if self.fixed_by and replicas != self.least:
            do = "end the run, and go on with another rollout.num_replicas and resume=auto"
            raise ConfigError(explain(asked, f"a run with {self.fixed_by} keeps its {self.least}", do))
        if replicas < self.least:
            found = f"the places of {self.least} (rollout.num_replicas) are reserved for the whole run"
            do = f"ask for {self.least} or more, or go on with a smaller rollout.num_replicas and resume=auto"
            raise ConfigError(explain(asked, found, do))
        if self.most is not None and replicas > self.most:
            do = f"ask for {self.most} or fewer, or raise it with resume=auto"
            raise ConfigError(explain(asked, f"rollout.max_replicas={self.most}", do))
        if replicas > MOST_REPLICAS:
            do = f"ask for {MOST_REPLICAS} or fewer"
            raise ConfigError(explain(asked, f"no run has more than {MOST_REPLICAS}", do))


@dataclass(frozen=True, slots=True)
class Changes:
    """Replica ids: `begin` to wait for a place, `give_up` waiting for one, `leave` the fleet."""

    begin: tuple[int, ...] = ()
    give_up: tuple[int, ...] = ()
    leave: tuple[int, ...] = ()


def changes(target: int, least: int, states: Mapping[int, ReplicaState], waiting: Collection[int]) -> Changes:
    """The changes that bring a fleet to its target. Pure.

    Args:
        target: at least `least`.
        states: of the replicas in the table. Leaving replicas do not count, but their ids are not free yet; a leaving
            replica with a reserved place counts, because it comes back.
        waiting: ids of replicas that wait for a place.
    """
    there = [i for i, state in states.items() if state != "leaving" or i < least]
    surplus = len(there) + len(waiting) - target
    if surplus <= 0:
        free = (i for i in itertools.count() if i not in states and i not in waiting)
        return Changes(begin=tuple(itertools.islice(free, max(0, min(-surplus, MOST_WAITS - len(waiting))))))
    # Too many: cancel waits before stopping replicas. Reserved places stay.
    give_up = sorted((i for i in waiting if i >= least), reverse=True)[:surplus]
    spare = sorted((i for i in there if i >= least), key=lambda i: (SPARED.index(states[i]), -i))
    return Changes(give_up=tuple(give_up), leave=tuple(spare[: surplus - len(give_up)]))


class FleetSize:
    """Keeps the number of replicas at the target. Owns the target, the waits for places, and the places that are not
    reserved for the whole run."""

    def __init__(
        self,
        pool: ReplicaPool,
        placements: PlacementGroups,
        limits: FleetLimits,
        *,
        start_timeout_s: float,
        on_event: Callable[[events.Event], None],
        look_s: float = LOOK_S,
    ) -> None:
        """
        Args:
            start_timeout_s: of one wait for a place; waits are repeated.
            on_event: `EventLog.write`.
        """
        self._pool = pool
        self._placements = placements
        self._limits = limits
        self._start_timeout_s = start_timeout_s
        self._on_event = on_event
        self._look_s = look_s
        self._target = limits.least
        self._waits: dict[int, asyncio.Task[None]] = {}
        self._found: dict[int, str] = {}
        """Finding of a replica's last wait for a place."""
        self._taken: set[int] = set()
        """Replicas with their own place."""
        self._returning: set[int] = set()
        """Replicas whose place is being given back."""
        self._asked = asyncio.Event()
        self._begun = False

    @property
    def report(self) -> FleetReport:
        states: dict[int, ReplicaState] = {i: row.state for i, row in self._pool.table.rows.items()}
        waiting = {i: self._found.get(i, "") for i in sorted(self._waits)}
        limits = self._limits
        most = limits.least if limits.fixed_by else limits.most or MOST_REPLICAS
        return FleetReport(self._target, limits.least, most, states, waiting)

    def resize(self, replicas: int, asked_by: Literal["recipe", "command"] = "command") -> FleetReport:
        """Sets the target for `watch` and returns the present fleet. Raises ConfigError if the run cannot have this
        many replicas."""
        self._limits.require(replicas)
        if replicas != self._target:
            logger.info("%d replicas are wanted from now on; before it were %d", replicas, self._target)
            self._on_event(events.FleetResized(replicas, self._target, asked_by))
            self._target = replicas
            self._apply()  # now, not in `watch`: no surplus replica may join in between
            self._asked.set()
        return self.report

    async def watch(self) -> None:
        """Brings the fleet to its target, again and again.

        Consumes: targets; replicas that have left the table; nodes that were asked to end.
        Produces: replicas that join and leave, and their places.
        Waits for: places, at most `start_timeout_s` each time; the nodes are looked at every second.
        Unblocked by: a node that has room, a smaller target.
        Stops when: it is cancelled. A place that Ray refuses to look for ends the run.
        """
        if not self._begun and self._limits.most is not None:
            self.resize(self._limits.most, "recipe")
        self._begun = True
        try:
            while True:
                await self._look()
                self._asked.clear()
                await wait_event(self._asked, self._look_s)
        finally:
            waits = list(self._waits.values())
            self._waits.clear()
            await cancel(*waits)

    async def _look(self) -> None:
        for task in list(self._waits.values()):
            if task.done():
                task.result()  # raises; a successful wait has removed itself
        table = self._pool.table
        # Leave draining nodes, then give back the places of replicas that have left the table.
        for i in await self._placements.ending():
            if i in table.rows:
                self._pool.leave(i, "preempted")
        self._returning = self._taken - self._pool.table.rows.keys() - self._waits.keys()
        for i in sorted(self._returning):
            await self._placements.give_back(i)
        self._taken -= self._returning
        self._returning = set()
        self._apply()

    def _apply(self) -> None:
        states: dict[int, ReplicaState] = dict.fromkeys(self._returning, "leaving")
        states |= {i: row.state for i, row in self._pool.table.rows.items()}
        found = changes(self._target, self._limits.least, states, self._waits)
        for i in found.give_up:
            self._waits.pop(i).cancel()
        for i in found.leave:
            self._pool.leave(i, "scaled")
        for i in found.begin:
            self._found.pop(i, None)
            self._waits[i] = asyncio.create_task(self._join(i), name=f"place of replica {i}")

    async def _join(self, replica_id: int) -> None:
        """Returns when the replica has a place and begins to start. Keeps waiting: Ray's autoscaler adds nodes for
        pending places."""
        while True:
            self._taken.add(replica_id)
            try:
                await self._placements.ready(replica_id, self._start_timeout_s)
            except NoPlace as error:
                self._found[replica_id] = str(error)
                logger.info("replica %d waits on for a place: %s", replica_id, error)
            else:
                break
        self._pool.join(replica_id)
        del self._waits[replica_id]
