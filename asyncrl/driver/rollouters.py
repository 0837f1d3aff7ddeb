"""Keeps a rollouter running: a new process replaces one that died or answers no health check.

The queue requeues the groups of a dead rollouter. The replicas forget the dead client and stop generating for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from asyncrl.errors import AsyncRLError, DeadlineExceeded, ProcessDied, RunFailed, explain
from asyncrl.remote.failure_policy import FailureAction, failure_action
from asyncrl.remote.restart_budget import RestartBudget
from asyncrl.remote.waits import ROLLOUTER
from asyncrl.types import EvalResult, PartialGroup, ReplicaTable, RolloutStats
from asyncrl.types.events import Event, RollouterFailed, RollouterRestarted

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RolloutProcess(Protocol):
    """One rollouter, as `rollout.actor_channels.RolloutControl` reaches it; its errors name `ROLLOUTER`."""

    async def start(self, timeout_s: float) -> RolloutStats: ...
    async def run(self) -> None: ...
    async def evaluate(self, name: str, seed: int, timeout_s: float, table: ReplicaTable | None) -> EvalResult: ...
    async def set_replicas(self, table: ReplicaTable, own: Collection[int] | None) -> None: ...
    async def set_pool(self, key: str, table: ReplicaTable) -> None: ...
    async def partials(self, timeout_s: float) -> list[PartialGroup]: ...
    async def stats(self, timeout_s: float) -> RolloutStats: ...
    async def stop(self, timeout_s: float) -> None: ...
    def kill(self) -> None: ...
    async def ended(self, timeout_s: float) -> None: ...


@dataclass(slots=True, eq=False)
class _Incarnation:
    """One rollouter process. `up`: it has started and has a table. `failure`: why the supervisor has dropped it."""

    control: RolloutProcess
    client_id: str
    up: bool = False
    told: ReplicaTable | None = None
    """The table that it has."""
    pools: dict[str, ReplicaTable] = field(default_factory=dict)
    """Of the pools of other models, the tables that it has."""
    failure: ProcessDied | None = None
    given_up: asyncio.Event = field(default_factory=asyncio.Event)


class RolloutSupervisor:
    """Stands for the rollouter of a run, whichever process that is. Owns the process, the budget of its restarts and
    the newest replica table, which a replacement gets at its start."""

    def __init__(
        self,
        spawn: Callable[[str], RolloutProcess],
        take_back: Callable[[str, str], Awaitable[int]],
        forget: Callable[[str], Awaitable[None]],
        *,
        budget: RestartBudget,
        start_timeout_s: float,
        on_event: Callable[[Event], None],
        place: tuple[int, int] = (0, 1),
    ) -> None:
        """
        Args:
            spawn: makes the process of a rollouter from its client id; it has no replicas and is not started.
            take_back: (reason, client id) requeues every running group; the queue then refuses calls of that client.
                Returns the number of groups.
            forget: makes the replicas drop a dead client.
            budget: limits the restarts.
            on_event: `EventLog.write`.
            place: its index among the rollouters of the run, and their number.
        """
        self._index, self._count = place
        self._spawn = spawn
        self._take_back = take_back
        self._forget = forget
        self._budget = budget
        self._start_timeout_s = start_timeout_s
        self._on_event = on_event
        self._table = ReplicaTable()
        self._pools: dict[str, ReplicaTable] = {}
        """Section of the recipe -> the replicas of that pool of another model."""
        self._current = self._new()
        self._ready = asyncio.Event()
        self._stats: RolloutStats
        self._forgetting: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def client_id(self) -> str:
        """Name of the current rollouter among the clients of the replicas."""
        return self._current.client_id

    async def start(self, timeout_s: float) -> RolloutStats:
        """Starts the first one. Raises what that raises: nothing is replaced before the run has begun."""
        return await self._start(timeout_s)

    async def run(self) -> None:
        """Runs the rollouter, and replaces it whenever its process dies.

        Consumes: deaths and missed health checks of the rollouter.
        Produces: a new rollouter that has the replica table; the groups of the dead one, requeued.
        Waits for: starts and calls of the rollouter, each with its deadline.
        Unblocked by: the answers; a health check that drops the rollouter.
        Stops when: `stop` is called.

        Raises RunFailed: the restarts are spent; else what a rollouter raised, or what the calls to the queue raise.
        """
        while True:
            current = self._current
            try:
                await self._answer(current, current.control.run())
                return
            except ProcessDied as error:
                if not self._is_gone(current, error):
                    raise
                if self._stopping:
                    return
                await self._restart(error)

    async def evaluate(self, name: str, seed: int, timeout_s: float, leased: ReplicaTable | None = None) -> EvalResult:
        """As `Rollouter.evaluate`; starts again on the next rollouter when this one dies. Raises DeadlineExceeded.

        Args:
            leased: the replicas that answer all of it; None: all that serve, of whichever rollouter.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._ready.wait()
            except TimeoutError:
                found = f"none was up when the {timeout_s:g} s were over"
                do = "see the log of the run, or raise eval.timeout_s"
                raise DeadlineExceeded(explain(f"evaluate({name}) of the rollouter", found, do)).of(ROLLOUTER) from None
            current = self._current
            if not current.up:
                continue  # it died between its wake and this task's
            try:
                left_s = max(0.0, deadline - time.monotonic())
                table = leased if leased is not None or self._count == 1 else self._table
                return await self._answer(current, current.control.evaluate(name, seed, left_s, table))
            except ProcessDied as error:
                if not self._is_gone(current, error):
                    raise

    async def set_replicas(self, table: ReplicaTable) -> None:
        """Gives the table to the rollouter, and later to each replacement. A rollouter that is not up yet gets it at
        its start; one that dies during the call is replaced."""
        self._table = table
        await self._tell_current()

    async def set_pool(self, key: str, table: ReplicaTable) -> None:
        """As `set_replicas`, of the pool of another model. `key`: its section of the recipe."""
        self._pools[key] = table
        await self._tell_current()

    async def _tell_current(self) -> None:
        current = self._current
        if current.up:
            try:
                await self._introduce(current)
            except (ProcessDied, DeadlineExceeded) as error:
                self._blame(current, error)

    async def partials(self, timeout_s: float) -> list[PartialGroup]:
        """The running groups; none while no rollouter is up, since the groups of a dead one start again anyway."""
        current = self._current
        if not current.up:
            return []
        try:
            return await self._answer(current, current.control.partials(timeout_s))
        except (ProcessDied, DeadlineExceeded) as error:
            if not self._is_gone(current, error) and not self._is_its_own(error):
                raise
            logger.warning("a checkpoint goes without the tokens of running groups: %s", error)
            return []

    async def stats(self, timeout_s: float) -> RolloutStats:
        """The health check: a rollouter that does not answer in time is killed and replaced. Until the next one is up,
        the last statistics are returned; the restart has its own deadline."""
        current = self._current
        if current.up:
            try:
                self._stats = await self._answer(current, current.control.stats(timeout_s))
            except (ProcessDied, DeadlineExceeded) as error:
                self._blame(current, error)
        return self._stats

    async def stop(self, timeout_s: float) -> None:
        """Asks the rollouter to stop, and kills what is left of it. Raises what the call raises."""
        self._stopping = True
        forgetting = list(self._forgetting)
        for task in forgetting:
            task.cancel()
        await asyncio.gather(*forgetting, return_exceptions=True)
        try:
            if self._current.failure is None:
                await self._current.control.stop(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills the rollouter; it is not replaced. Idempotent."""
        self._stopping = True
        self._current.control.kill()

    async def ended(self, timeout_s: float) -> None:
        """Returns when the killed process has exited. Raises DeadlineExceeded."""
        await self._current.control.ended(timeout_s)

    # -- inside --------------------------------------------------------------------------------------------------

    def _new(self) -> _Incarnation:
        client_id = f"rollouter-{uuid.uuid4().hex[:12]}"  # replicas refuse the clients that they were told to forget
        return _Incarnation(self._spawn(client_id), client_id)

    async def _start(self, timeout_s: float) -> RolloutStats:
        current = self._current
        started = await self._answer(current, current.control.start(timeout_s))
        await self._introduce(current)
        serving = self._table.those("serving", "held").keys() & self._table.part(self._index, self._count)
        self._stats = replace(started, replicas=tuple(serving))
        current.up = True
        self._ready.set()
        return self._stats

    async def _introduce(self, current: _Incarnation) -> None:
        """Sends the tables until the rollouter has the newest ones: another may come during a call."""
        while current.told is not self._table:
            table = self._table
            own = None if self._count == 1 else table.part(self._index, self._count)
            await self._answer(current, current.control.set_replicas(table, own))
            current.told = table
        for key in self._pools:
            while current.pools.get(key) is not self._pools[key]:
                table = self._pools[key]
                await self._answer(current, current.control.set_pool(key, table))
                current.pools[key] = table

    async def _restart(self, failure: ProcessDied) -> None:
        """Replaces the current rollouter, which is dead. Raises RunFailed."""
        while True:
            dead = self._current
            logger.error("the rollouter has failed: %s", failure)
            self._on_event(RollouterFailed(str(failure), restarts=self._budget.total))
            if not self._budget.take():
                raise RunFailed(
                    explain(
                        "the rollouter to go on",
                        f"it failed after {self._budget}: {failure}",
                        "see the log of the run; raise recovery.max_restarts, or go on with resume=auto",
                    )
                ).of(ROLLOUTER) from failure
            started_s = time.monotonic()
            taken = await self._take_back(f"the rollouter failed: {failure}", dead.client_id)
            task = asyncio.create_task(self._drop(dead.client_id), name=f"forget {dead.client_id}")
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)
            self._current = self._new()
            try:
                await self._start(self._start_timeout_s)
            except (ProcessDied, DeadlineExceeded) as error:
                if not self._is_gone(self._current, error):
                    self._give_up(self._current, ProcessDied(f"it could not start: {error}").of(ROLLOUTER))
                assert self._current.failure is not None
                failure = self._current.failure
                continue
            self._on_event(RollouterRestarted(time.monotonic() - started_s, groups=taken))
            return

    async def _drop(self, client_id: str) -> None:
        try:
            await self._forget(client_id)
        except AsyncRLError as error:  # its requests end by themselves, and their tokens are never collected
            logger.warning("replicas may still work for the dead rollouter %s: %s", client_id, error)

    async def _answer(self, current: _Incarnation, work: Coroutine[Any, Any, T]) -> T:
        """Awaits a call of this rollouter. Raises ProcessDied as soon as the supervisor drops the rollouter: Ray may
        take long to report the death of a process that was stopped and then killed."""
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
            answer.add_done_callback(_seen)

    def _is_gone(self, current: _Incarnation, error: AsyncRLError) -> bool:
        """True when `error` says that this rollouter is dead; drops the rollouter then."""
        if error is current.failure:
            return True
        if isinstance(error, ProcessDied) and self._is_its_own(error):
            self._give_up(current, error)
            return True
        return False

    @staticmethod
    def _is_its_own(error: AsyncRLError) -> bool:
        """True when the rollouter failed, and not another process that it needs."""
        return failure_action(error.process, error, restarts_left=True) is FailureAction.RESTART_ROLLOUTER

    def _blame(self, current: _Incarnation, error: AsyncRLError) -> ProcessDied:
        """Drops this rollouter because it is dead or did not answer; raises errors about another process."""
        if not self._is_gone(current, error):
            if not self._is_its_own(error):
                raise error
            self._give_up(current, ProcessDied(f"the rollouter was killed: {error}").of(ROLLOUTER))
        assert current.failure is not None
        return current.failure

    def _give_up(self, current: _Incarnation, failure: ProcessDied) -> None:
        if current.failure is None:
            current.failure = failure
            current.up = False
            current.control.kill()
            current.given_up.set()
            if current is self._current:
                self._ready.clear()


def _seen(task: asyncio.Task[Any]) -> None:
    """Marks the error of an abandoned call as retrieved."""
    if not task.cancelled():
        task.exception()
