"""Keeps the rollouters of a run up: replaces a rollouter that died or misses a health check.

The queue requeues the groups of a dead rollouter. The replicas forget the dead client and stop generating for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from asyncrl.driver.fleet.actor_channels import channels
from asyncrl.errors import AsyncRLError, DeadlineExceeded, ProcessDied, RunFailed, explain
from asyncrl.remote.actor_client import CALL_TIMEOUT_S, ActorClient
from asyncrl.remote.failure_policy import FailureAction, RestartBudget, failure_action
from asyncrl.remote.tasks import cancel, concurrently, kept, retrieved
from asyncrl.remote.waits import FOREVER_S, ROLLOUTER
from asyncrl.rollout.rollouter import Rollouter
from asyncrl.types import EvalResult, PartialGroup, ReplicaTable, RolloutStats, Trajectory
from asyncrl.types.events import Event, RollouterFailed, RollouterRestarted

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLICY = ""
GRACE_S = 5.0
"""Extra time of an evaluation's call beyond the rollouter's deadline, so that the rollouter's error arrives."""


@dataclass(slots=True, eq=False)
class _Incarnation:
    """One rollouter process. `up`: started, and has the tables. `failure`: why it was dropped."""

    actor: ActorClient[Rollouter]
    client_id: str
    up: bool = False
    told: dict[str, ReplicaTable] = field(default_factory=dict)
    """The tables sent to it."""
    failure: ProcessDied | None = None
    given_up: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Member:
    """One rollouter of the run, across its processes. `ready`: set while `current` is up."""

    index: int
    current: _Incarnation
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    stats: RolloutStats | None = None
    """The last known statistics; None before the first start."""


class Rollouters:
    """All rollouters of a run behind one interface: the message queue gives each its share of the groups, and each
    works with its part of the replica table. Owns their processes, their restart budget and the newest tables, which a
    replacement gets at its start."""

    def __init__(
        self,
        spawn: Callable[[str], ActorClient[Rollouter]],
        take_back: Callable[[str, str], Awaitable[int]],
        forget: Callable[[str], Awaitable[None]],
        *,
        count: int,
        budget: RestartBudget,
        start_timeout_s: float,
        on_event: Callable[[Event], None],
    ) -> None:
        """
        Args:
            spawn: makes an actor from its client id, without replicas and not started.
            take_back: (reason, client id) requeues every running group of that client and refuses its later calls.
                Returns the number of groups.
            forget: makes the replicas drop a dead client.
            budget: of all restarts together.
            on_event: `EventLog.write`.
        """
        self._spawn = spawn
        self._take_back = take_back
        self._forget = forget
        self._budget = budget
        self._start_timeout_s = start_timeout_s
        self._on_event = on_event
        self._tables = {POLICY: ReplicaTable()}
        """Section of the recipe -> replicas of that model's pool; the policy's under `POLICY`."""
        self._members = tuple(_Member(index, self._new()) for index in range(count))
        self._turns = itertools.cycle(self._members)
        self._evaluations = itertools.count()
        self._forgetting: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def client_ids(self) -> tuple[str, ...]:
        """Ids under which the replicas know the current rollouters."""
        return tuple(member.current.client_id for member in self._members)

    async def start(self, timeout_s: float) -> RolloutStats:
        """Starts all. Raises the first error: nothing is replaced before the run has begun."""
        return together(await concurrently(self._start(member, timeout_s) for member in self._members))

    async def run(self) -> None:
        """Runs all rollouters, and replaces each that dies.

        Consumes: deaths and missed health checks of the rollouters.
        Produces: a new rollouter that has the replica table; the groups of the dead one, requeued.
        Waits for: starts and calls of the rollouters, each with its deadline.
        Unblocked by: the answers; a health check that drops a rollouter.
        Stops when: `stop` is called.

        Raises RunFailed if the restarts are spent; otherwise the first error of a rollouter or of a call to the queue.
        """
        await concurrently(self._run(member) for member in self._members)

    async def evaluate(self, name: str, seed: int, timeout_s: float, leased: ReplicaTable | None = None) -> EvalResult:
        """`Rollouter.evaluate`, by the rollouters in turn; starts over on the next process when one dies. Raises
        DeadlineExceeded.

        Args:
            leased: the replicas that answer; None: all serving replicas, of every rollouter.
        """
        member, deadline = next(self._turns), time.monotonic() + timeout_s
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await member.ready.wait()
            except TimeoutError:
                found = f"none was up when the {timeout_s:g} s were over"
                do = "see the log of the run, or raise eval.timeout_s"
                raise DeadlineExceeded(explain(f"evaluate({name}) of the rollouter", found, do)).of(ROLLOUTER) from None
            current = member.current
            if not current.up:
                continue  # it died between `ready` and now
            table = self._tables[POLICY] if leased is None and len(self._members) > 1 else leased
            if table is not None:
                # Each evaluation is its own client, which ends with the rollouter: see `Replica.forget_client`.
                table = channels(table, f"{current.client_id}/evaluation-{next(self._evaluations)}")
            left_s = max(0.0, deadline - time.monotonic())
            work = current.actor.call(left_s + GRACE_S, Rollouter.evaluate, name, seed, left_s, table)
            try:
                return await self._answer(current, work)
            except ProcessDied as error:
                if not self._is_gone(member, current, error):
                    raise

    async def score(self, sequences: Sequence[Trajectory], timeout_s: float) -> list[np.ndarray]:
        """`Rollouter.score`, by the first rollouter. Raises ProcessDied, DeadlineExceeded, GenerationError."""
        current = self._members[0].current
        return await current.actor.call(timeout_s, Rollouter.score, tuple(sequences))

    async def set_pool(self, key: str, table: ReplicaTable) -> None:
        """Gives the table of one model's pool to the rollouters, and later to each replacement. A rollouter that is not
        up yet gets it at its start; one that dies during the call is replaced. `key`: the model's section of the
        recipe, or `POLICY`."""
        self._tables[key] = table
        await concurrently(self._tell(member) for member in self._members)

    async def partials(self, timeout_s: float) -> list[PartialGroup]:
        """The running groups, without those of a dead rollouter: they start over anyway."""
        found = await concurrently(self._partials(member, timeout_s) for member in self._members)
        return list(itertools.chain.from_iterable(found))

    async def stats(self, timeout_s: float) -> RolloutStats:
        """The health check: kills and replaces a rollouter that does not answer in time. Its last statistics count
        until the next process is up; the restart has its own deadline."""
        return together(await concurrently(self._check(member, timeout_s) for member in self._members))

    async def stop(self, timeout_s: float) -> None:
        """Asks all to stop, then kills them. Raises the first error of a call."""
        self._stopping = True
        await cancel(*self._forgetting)
        alive = [m.current.actor for m in self._members if m.current.failure is None]
        stops = [actor.call(timeout_s, Rollouter.stop) for actor in alive]
        try:
            outcomes = await asyncio.gather(*stops, return_exceptions=True)
        finally:
            self.kill()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def kill(self) -> None:
        """Kills the rollouters; they are not replaced. Idempotent."""
        self._stopping = True
        for member in self._members:
            member.current.actor.kill()

    async def ended(self, timeout_s: float) -> None:
        """Returns when all killed processes have exited. Raises DeadlineExceeded."""
        await concurrently(member.current.actor.ended(timeout_s, Rollouter.stats) for member in self._members)

    # -- one of them ---------------------------------------------------------------------------------------------

    def _new(self) -> _Incarnation:
        client_id = f"rollouter-{uuid.uuid4().hex[:12]}"  # a fresh id: replicas refuse forgotten clients
        return _Incarnation(self._spawn(client_id), client_id)

    async def _start(self, member: _Member, timeout_s: float) -> RolloutStats:
        current = member.current
        started = await self._answer(current, current.actor.call(timeout_s, Rollouter.start))
        await self._introduce(member, current)
        table = self._tables[POLICY]
        serving = table.those("serving", "held").keys() & table.part(member.index, len(self._members))
        member.stats = replace(started, replicas=tuple(serving))
        current.up = True
        member.ready.set()
        return member.stats

    async def _run(self, member: _Member) -> None:
        while True:
            current = member.current
            try:
                # Lasts as long as the run; the health check bounds it.
                await self._answer(current, current.actor.call(FOREVER_S, Rollouter.run))
                return
            except ProcessDied as error:
                if not self._is_gone(member, current, error):
                    raise
                if self._stopping:
                    return
                await self._restart(member, error)

    async def _restart(self, member: _Member, failure: ProcessDied) -> None:
        """Replaces the current, dead process. Raises RunFailed."""
        while True:
            dead = member.current
            logger.error("the rollouter has failed: %s", failure)
            self._on_event(RollouterFailed(str(failure), restarts=self._budget.total))
            if not self._budget.take():
                found = f"it failed after {self._budget}: {failure}"
                do = "see the log of the run; raise recovery.max_restarts, or go on with resume=auto"
                raise RunFailed(explain("the rollouter to go on", found, do)).of(ROLLOUTER) from failure
            # Requeue before the start: the queue then refuses late calls of the dead client.
            started_s = time.monotonic()
            taken = await self._take_back(f"the rollouter failed: {failure}", dead.client_id)
            kept(self._forgetting, self._drop(dead.client_id), f"forget {dead.client_id}")
            member.current = self._new()
            try:
                await self._start(member, self._start_timeout_s)
            except (ProcessDied, DeadlineExceeded) as error:
                if not self._is_gone(member, member.current, error):
                    self._give_up(member, member.current, ProcessDied(f"it could not start: {error}").of(ROLLOUTER))
                failure = member.current.failure or failure
            else:
                self._on_event(RollouterRestarted(time.monotonic() - started_s, groups=taken))
                return

    async def _drop(self, client_id: str) -> None:
        try:
            await self._forget(client_id)
        except AsyncRLError as error:  # its requests end by themselves, and nobody collects their tokens
            logger.warning("replicas may still work for the dead rollouter %s: %s", client_id, error)

    async def _tell(self, member: _Member) -> None:
        current = member.current
        if current.up:
            try:
                await self._introduce(member, current)
            except (ProcessDied, DeadlineExceeded) as error:
                self._blame(member, current, error)

    async def _introduce(self, member: _Member, current: _Incarnation) -> None:
        """Sends tables until the process has the newest: a new one may come during a call."""
        count, call = len(self._members), current.actor.call

        def missing() -> str | None:
            return next((key for key, table in self._tables.items() if current.told.get(key) is not table), None)

        while (key := missing()) is not None:
            table = self._tables[key]
            named = channels(table, current.client_id)
            if key == POLICY:
                own = None if count == 1 else table.part(member.index, count)
                work = call(CALL_TIMEOUT_S, Rollouter.set_replicas, named, own)
            else:
                work = call(CALL_TIMEOUT_S, Rollouter.set_pool, key, named)
            await self._answer(current, work)
            current.told[key] = table

    async def _partials(self, member: _Member, timeout_s: float) -> list[PartialGroup]:
        current = member.current
        if not current.up:
            return []
        try:
            return await self._answer(current, current.actor.call(timeout_s, Rollouter.partials))
        except (ProcessDied, DeadlineExceeded) as error:
            if not self._is_gone(member, current, error) and not _is_its_own(error):
                raise
            logger.warning("a checkpoint goes without the tokens of running groups: %s", error)
            return []

    async def _check(self, member: _Member, timeout_s: float) -> RolloutStats:
        current = member.current
        if current.up:
            try:
                member.stats = await self._answer(current, current.actor.call(timeout_s, Rollouter.stats))
            except (ProcessDied, DeadlineExceeded) as error:
                self._blame(member, current, error)
        assert member.stats is not None, "start comes first"
        return member.stats

    # -- whose fault it is ---------------------------------------------------------------------------------------

    async def _answer(self, current: _Incarnation, work: Coroutine[Any, Any, T]) -> T:
        """Awaits a call of this process. Raises ProcessDied as soon as the process is dropped: Ray may take long to
        report the death of a process that was stopped and then killed."""
        answer = asyncio.create_task(work)
        given_up = asyncio.create_task(current.given_up.wait())
        try:
            await asyncio.wait([answer, given_up], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                assert current.failure is not None
                raise current.failure
            return await answer
        finally:
            given_up.cancel()
            answer.cancel()
            answer.add_done_callback(retrieved)

    def _is_gone(self, member: _Member, current: _Incarnation, error: AsyncRLError) -> bool:
        """True if `error` says that this process is dead; then drops the process."""
        if error is current.failure:
            return True
        if isinstance(error, ProcessDied) and _is_its_own(error):
            self._give_up(member, current, error)
            return True
        return False

    def _blame(self, member: _Member, current: _Incarnation, error: AsyncRLError) -> None:
        """Drops this process because it is dead or did not answer; re-raises errors about another process."""
        if not self._is_gone(member, current, error):
            if not _is_its_own(error):
                raise error
            self._give_up(member, current, ProcessDied(f"the rollouter was killed: {error}").of(ROLLOUTER))

    def _give_up(self, member: _Member, current: _Incarnation, failure: ProcessDied) -> None:
        if current.failure is None:
            current.failure = failure
            current.up = False
            current.actor.kill()
            current.given_up.set()
            if current is member.current:
                member.ready.clear()


def _is_its_own(error: AsyncRLError) -> bool:
    """True if the rollouter itself failed, not a process that it needs."""
    return failure_action(error.process, error, restarts_left=True) is FailureAction.RESTART_ROLLOUTER


def together(stats: Sequence[RolloutStats]) -> RolloutStats:
    """The sums over all rollouters. The sum in `pid` changes when any process is replaced."""
    seconds, sandboxes = Counter[str](), Counter[str]()
    for one in stats:
        seconds.update(one.replica_s)
        sandboxes.update(one.sandboxes)
    summed = ("pid", "groups", "requests", "cpu_s", "workers_cpu_s", "reprefilled_tokens", "cancelled_groups")
    return replace(
        stats[0],
        **{name: sum(getattr(one, name) for one in stats) for name in summed},
        replicas=tuple(sorted({i for one in stats for i in one.replicas})),
        replica_s=dict(seconds),
        sandboxes=dict(sandboxes),
    )
