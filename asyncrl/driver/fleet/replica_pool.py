"""The replicas of a run or a server: started together, watched, suspended when late, replaced when dead or wrong.

`fleet.membership` decides the states and the consequences of failures. The pool acts on them: it starts, checks, resets
and kills processes. The listener, which routes requests, gets the whole table after each change and computes the
difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping

from asyncrl.driver.fleet.device_turns import SharedDevices
from asyncrl.driver.fleet.membership import ASK_AGAIN_S, EXIT_S, LEAVE_S, Membership, PoolSettings, after_failure
from asyncrl.errors import AsyncRLError, ConfigError, DeadlineExceeded, RunFailed, explain
from asyncrl.inference.replica import GRACE_S, Replica
from asyncrl.inference.replica_actor import ReplicaControl
from asyncrl.remote.failure_policy import RestartBudget
from asyncrl.remote.tasks import cancel, kept
from asyncrl.types import ReplicaRow, ReplicaState, ReplicaStats, ReplicaTable, events

logger = logging.getLogger(__name__)

UP: tuple[ReplicaState, ...] = ("newcomer", "serving", "held")
ROUTED: tuple[ReplicaState, ...] = ("serving", "held")


class ReplicaPool:
    """Owns the processes of the replicas, their states and the budget for replacing them.

    Consumes: failures that its health watch, the checkpoint engine and the coordinator report.
    Produces: the members that a publish reaches; a replacement for each failed replica; the end of each replica that
    its machine or `leave` asked to go; the replica table.
    Waits for: health checks, every `health_interval_s` and at most `health_timeout_s`; starts, at most
    `start_timeout_s`; suspended replicas, at most `rejoin_timeout_s`.
    Unblocked by: the answers of the replicas.
    Stops when: `stop` is called. `watch` raises once a failed replica exceeds the budget.
    """

    def __init__(
        self,
        spawn: Callable[[int], ReplicaControl],
        num_replicas: int,
        settings: PoolSettings,
        *,
        on_event: Callable[[events.Event], None],
        devices: SharedDevices | None = None,
    ) -> None:
        """
        Args:
            spawn: makes the process of replica i, not started.
            on_event: `EventLog.write`.
            devices: devices shared with the trainer; None: the replicas have their own.
        """
        self._spawn = spawn
        self._settings = settings
        self._on_event = on_event
        self._devices = devices
        self._controls: dict[int, ReplicaControl] = {i: spawn(i) for i in range(num_replicas)}
        self._budget = RestartBudget(settings.max_restarts, settings.window_s)
        self._membership = Membership(self._controls, self._budget, restart_delay_s=settings.restart_delay_s)
        self._details: dict[int, str] = {}
        """Why a replica was suspended or replaced, until it serves again."""
        self._clients = PoolClients(lambda: self.table, settings.health_timeout_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._quiet = asyncio.Event()
        """Set while no publish is in progress."""
        self._quiet.set()
        self.failure: RunFailed | None = None
        """Set once a replica is lost that the budget does not replace."""
        self._stopping = False

    # -- who is there --------------------------------------------------------------------------------------------

    def those(self, *states: ReplicaState) -> dict[int, ReplicaControl]:
        """The replicas in one of these states."""
        return {i: self._controls[i] for i in self._membership.those(*states)}

    @property
    def members(self) -> dict[int, ReplicaControl]:
        """The replicas that are up and not leased: a publish reaches them."""
        return self.those(*UP)

    @property
    def newcomers(self) -> dict[int, ReplicaControl]:
        """Replicas that are up without committed weights."""
        return self.those("newcomer")

    @property
    def serving(self) -> dict[int, ReplicaControl]:
        """Replicas with committed weights: requests go to them."""
        return self.those(*ROUTED)

    @property
    def table(self) -> ReplicaTable:
        """All replicas, for the listener."""
        asleep = frozenset[int]() if self._devices is None else self._devices.turns.asleep
        rows = {}
        for i, member in self._membership.members.items():
            state, detail = member.state, self._details.get(i, "")
            rows[i] = ReplicaRow(self._controls[i], state, member.incarnation, member.version, detail, i in asleep)
        return ReplicaTable(self._membership.generation, rows)

    async def set_listener(self, listener: Listener | None) -> None:
        """Sends the table to this listener, now and after each change; None: to nobody. Raises the listener's
        errors."""
        self._clients.listen(listener)
        await self._clients.tell()

    async def retell(self) -> None:
        """Sends the table under a new generation, for changes other than states. Raises the listener's errors."""
        self._membership.generation += 1
        await self._clients.tell()

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all replicas concurrently. Replaces replicas that fail to start as long as a quorum can come up, and
        returns when the others are up. Raises the first error beyond that, and any ConfigError immediately, since all
        replicas share the configuration."""
        controls, failed = dict(self._controls), dict[int, Exception]()
        spare = 0 if self._settings.quorum is None else len(controls) - self._settings.quorum

        async def one(replica_id: int, control: ReplicaControl) -> None:
            try:
                await self._load(replica_id, control)
            except Exception as error:
                if isinstance(error, ConfigError) or len(failed) >= spare:
                    raise
                failed[replica_id] = error
            else:
                self._came_up(replica_id)

        await asyncio.gather(*(one(i, control) for i, control in controls.items()))
        for replica_id, error in failed.items():
            self.fail(replica_id, controls[replica_id], error)

    def fail(self, replica_id: int, control: ReplicaControl, why: BaseException | str) -> None:
        """Takes this incarnation of a replica out; ignores an incarnation that has been replaced.

        A late replica (DeadlineExceeded) is suspended if the settings give it time to rejoin. Any other is killed and
        replaced. When the budget is spent, `watch` and `wait_member` raise RunFailed.
        """
        if not self._is_awaited(replica_id, control):
            return
        others_up, member = len(self._up.keys() - {replica_id}), self._membership.members[replica_id]
        followup = after_failure(replica_id, member, why, others_up=others_up, settings=self._settings)
        if followup == "suspend":
            self._suspend(replica_id, control, why)
        elif followup == "leave":
            self.leave(replica_id, "no_place")
        else:
            self._replace(replica_id, control, why, stays_away=followup == "stay_away")

    async def wait_member(self, timeout_s: float) -> None:
        """Returns when at least one replica is up. Raises RunFailed, DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.members:
                    await self._wait_change()
        except TimeoutError:
            found, do = f"none was up within {timeout_s:.1f} s", "see the log of the run"
            raise DeadlineExceeded(explain("a replica to publish to", found, do)) from None

    async def watch(self) -> None:
        """Checks the health of every member and resends the table (a connection can break although no process died),
        until cancelled. Raises RunFailed when a replica has failed and the budget is spent."""
        while True:
            try:
                async with asyncio.timeout(self._settings.health_interval_s):
                    await self._wait_change()
            except TimeoutError:
                await self.stats()
                self._clients.repeat()
                await self._clients.tell()

    async def stats(self) -> list[ReplicaStats]:
        """Statistics of every member that answers, also during a publish. A member that does not answer has failed
        (`fail`); a member whose process was asked to end leaves."""

        async def one(replica_id: int, control: ReplicaControl) -> ReplicaStats | None:
            try:
                found = await control.call(self._settings.health_timeout_s, Replica.stats)
            except AsyncRLError as error:
                self.fail(replica_id, control, error)
                return None
            if found.must_leave and self._is_awaited(replica_id, control):
                self.leave(replica_id, "preempted")
            return found

        answers = await asyncio.gather(*(one(i, control) for i, control in self._up.items()))
        return [a for a in answers if a is not None]

    async def stop(self, timeout_s: float) -> None:
        """Asks every replica to stop, then kills it. Replacements end."""
        self._stopping = True
        await cancel(*self._tasks)
        controls = list(self._controls.values())
        stops = (control.call(timeout_s, Replica.stop) for control in controls)
        for outcome in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.info("while stopping: %s", outcome)
        for control in controls:
            control.kill()

    # -- joining and leaving ------------------------------------------------------------------------------------

    def join(self, replica_id: int) -> None:
        """Adds a replica and begins to start it; it serves from its first publish on. Does nothing in a pool that is
        ending. Raises ValueError if the replica exists."""
        if self._stopping or self.failure is not None:
            return
        self._membership.require_free(replica_id)
        control = self._controls[replica_id] = self._spawn(replica_id)  # before it becomes a member: may raise
        self._membership.add(replica_id)
        self._on_event(events.ReplicaJoined(replica_id))
        kept(self._tasks, self._start(replica_id, control, 0.0), f"start replica {replica_id}")
        self._tell_soon(replica_id)

    def leave(self, replica_id: int, why: events.Departure) -> None:
        """Begins to take a replica out: it gets no new request, its requests in flight resume elsewhere with their
        tokens, and its process stops once no publish is in progress, `LEAVE_S` later at the latest. Costs no restart.
        Does nothing for a replica that is leaving, and in a pool that is ending."""
        member = self._membership.members.get(replica_id)
        if member is None or member.state == "leaving" or self._stopping or self.failure is not None:
            return
        logger.info("replica %d leaves: %s", replica_id, why)
        was_up = member.state not in ("starting", "dead")
        self._membership.apply(replica_id, "leave")
        self._on_event(events.ReplicaLeft(replica_id, why))
        leaves = self._leave(replica_id, self._controls[replica_id], stops=was_up)
        kept(self._tasks, leaves, f"leave of replica {replica_id}")

    # -- publishes -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Context of a publish: leaving replicas stay until its end, since it would wait for them."""
        self._quiet.clear()
        try:
            yield
        finally:
            self._quiet.set()

    async def hold(self, controls: Mapping[int, ReplicaControl]) -> None:
        """Announces that a rolling publish reaches these next: they get no new request until they have committed,
        unless every replica is held. Returns when the listener has the table. Raises the listener's errors."""
        for replica_id in self._current(controls):
            if self._membership.may(replica_id, "hold"):
                self._membership.apply(replica_id, "hold")
        await self._clients.tell()

    async def committed(self, controls: Mapping[int, ReplicaControl], version: int | None = None) -> int:
        """Records that these incarnations serve the trainer's weights; returns how many have not failed since.

        Returns once the listener has the table, so that nothing is sent to failed replicas. Raises the listener's
        errors.

        Args:
            version: the version that they serve; None if all serving replicas have the same.
        """
        for replica_id in self._current(controls):
            if self._membership.may(replica_id, "committed"):
                joins = self._membership.members[replica_id].state == "newcomer"
                self._membership.apply(replica_id, "committed", version)
                self._details.pop(replica_id, None)
                if joins:
                    self._on_event(events.ReplicaServing(replica_id))
        if self._devices is not None and self._devices.turns.phase == "waking":
            self._devices.turns.generate()
            self._devices.changed()
        await self._clients.tell()
        return len(self._current(controls))

    async def fence(self) -> None:
        """Makes every replica a newcomer: it closes its gate and drops its requests until the next publish.

        Needed when the training side restarts from a checkpoint older than the published version: the replicas hold
        weights of undone steps. Also drops the listener: set the next one afterwards.
        """
        self._clients.listen(None)
        up = self._up
        for replica_id in up:
            self._membership.apply(replica_id, "fenced")
        await asyncio.gather(*(self._reset(i, control) for i, control in up.items()))

    # -- evaluations and clients ---------------------------------------------------------------------------------

    async def lease(self, count: int) -> dict[int, ReplicaControl]:
        """Takes up to `count` serving replicas, but never the last one, out of rollout and publishes; returns them.

        Must not be called during a publish. Raises the listener's errors.
        """
        free = self.those("serving")
        chosen = sorted(free)[max(1, len(free) - count) :]
        for replica_id in chosen:
            self._membership.apply(replica_id, "lease")
            self._on_event(events.ReplicaLeased(replica_id))
        await self._clients.tell()
        return {i: control for i, control in self.those("leased").items() if i in chosen and free[i] is control}

    async def end_lease(self, controls: Mapping[int, ReplicaControl]) -> None:
        """Makes these replicas newcomers, if still leased. Does not raise: a replica that does not answer has
        failed."""

        async def one(replica_id: int, control: ReplicaControl) -> None:
            if await self._reset(replica_id, control, becomes=1) and self.those("leased").get(replica_id) is control:
                self._membership.apply(replica_id, "lease_ended")
                self._on_event(events.ReplicaReturned(replica_id))

        leased = {i: control for i, control in controls.items() if self.those("leased").get(i) is control}
        await asyncio.gather(*(one(i, control) for i, control in leased.items()))

    async def forget_client(self, client_id: str) -> None:
        """Stops all work for this client, whose process has ended. Does not raise: the next health check finds a
        failing replica."""
        await self._clients.forget(client_id, self._up)

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _up(self) -> dict[int, ReplicaControl]:
        """Members and leased replicas."""
        return self.those(*UP, "leased")

    def _current(self, controls: Mapping[int, ReplicaControl]) -> list[int]:
        """The ids in `controls` that were not replaced or suspended since, and are not leaving."""
        leaving = self._membership.those("leaving")
        return [i for i, control in controls.items() if self._controls.get(i) is control and i not in leaving]

    async def _succeeds(self, replica_id: int, control: ReplicaControl, work: Awaitable[None]) -> bool:
        """Awaits work of a replica; False if it failed, which is then the failure of the replica."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - task boundary: it becomes the failure of this replica
            self.fail(replica_id, control, error)
            return False
        return True

    async def _reset(self, replica_id: int, control: ReplicaControl, becomes: int = 0) -> bool:
        """Makes the replica, `becomes` incarnations later, forget its requests; False if it failed."""
        limit_s = self._settings.health_timeout_s
        incarnation = self._membership.members[replica_id].incarnation + becomes
        reset = control.call(limit_s + GRACE_S, Replica.reset, limit_s, incarnation)
        return await self._succeeds(replica_id, control, reset)

    def _suspend(self, replica_id: int, control: ReplicaControl, why: BaseException | str) -> None:
        logger.warning("replica %d is late and suspended: %s", replica_id, why)
        self._on_event(events.ReplicaSuspended(replica_id, str(why)))
        self._membership.apply(replica_id, "late")
        self._details[replica_id] = str(why)
        # A new control: a publish that still holds the old control cannot reach the replica after it rejoined.
        self._controls[replica_id] = control.abandon()
        kept(self._tasks, self._rejoin(replica_id, self._controls[replica_id], why), f"rejoin replica {replica_id}")
        self._tell_soon(replica_id)

    async def _rejoin(self, replica_id: int, control: ReplicaControl, why: BaseException | str) -> None:
        """Makes a suspended replica a newcomer once it answers again; fails it if it is dead or takes too long."""
        answers = await self._succeeds(replica_id, control, self._answer_again(replica_id, control, why))
        if answers and self._is_awaited(replica_id, control):
            self._membership.apply(replica_id, "answered")
            self._on_event(events.ReplicaRejoined(replica_id))
            self._changed.set()

    async def _answer_again(self, replica_id: int, control: ReplicaControl, why: BaseException | str) -> None:
        """Returns once the replica has answered and dropped its requests. Raises DeadlineExceeded after
        `rejoin_timeout_s`, ProcessDied."""
        health_s, limit_s = self._settings.health_timeout_s, self._settings.rejoin_timeout_s
        loop = asyncio.get_running_loop()
        deadline, incarnation = loop.time() + limit_s, self._membership.members[replica_id].incarnation + 1
        while True:
            try:
                await control.call(max(0.01, min(deadline - loop.time(), health_s)), Replica.stats)
                reset_s = max(deadline - loop.time(), health_s)
                await control.call(reset_s + GRACE_S, Replica.reset, reset_s, incarnation)
                return await self._clients.forget_all(control)
            # Clients that ended during the suspension could not reach this replica: `forget_all` catches up.
            except DeadlineExceeded:
                if loop.time() >= deadline:
                    found = f"it did not answer again within {limit_s:g} s; before that: {why}"
                    raise DeadlineExceeded(found) from None
                await asyncio.sleep(min(ASK_AGAIN_S, max(0.0, deadline - loop.time())))

    def _replace(self, replica_id: int, control: ReplicaControl, why: BaseException | str, *, stays_away: bool) -> None:
        logger.error("replica %d has failed: %s", replica_id, why)
        self._on_event(events.ReplicaFailed(replica_id, str(why), restarts=self._budget.total))
        # Phase 1: kill. The devices count as held until the process has exited.
        control.kill()
        if self._devices is not None:
            self._devices.turns.killed(replica_id)
            kept(self._tasks, self._exit(replica_id, control), f"exit of replica {replica_id}")
        # Phase 2: record the failure before `replace` begins the next incarnation.
        self._membership.apply(replica_id, "failed")
        self._details[replica_id] = str(why)
        # Phase 3: stay away, replace, or end the run.
        if stays_away and self._budget.take():
            logger.error("replica %d did not start and stays away; the others go on", replica_id)
            self._changed.set()
        elif (delay_s := self._membership.replace(replica_id)) is not None:
            control = self._controls[replica_id] = self._spawn(replica_id)
            kept(self._tasks, self._start(replica_id, control, delay_s), f"replace replica {replica_id}")
        else:
            found = f"it failed after {self._budget.total} replacement(s) in this run, {self._budget}: {why}"
            do = "see the log of the run; raise recovery.max_replica_restarts, or go on with resume=auto"
            self.failure = RunFailed(explain(f"replica {replica_id} to serve", found, do))
            self._changed.set()
        self._tell_soon(replica_id)

    async def _start(self, replica_id: int, control: ReplicaControl, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        loads = await self._succeeds(replica_id, control, self._load(replica_id, control))
        if loads and self._is_awaited(replica_id, control):
            self._came_up(replica_id)
            self._on_event(events.ReplicaStarted(replica_id))
            self._changed.set()
            self._tell_soon(replica_id)

    async def _load(self, replica_id: int, control: ReplicaControl) -> None:
        """Starts a replica once it has a place, with shared devices in the engines' turn. Raises the error of its
        start, NoPlace."""
        await control.placed(self._settings.start_timeout_s)
        if self._devices is not None:
            await self._devices.turn_to_load(replica_id)
            if not self._is_awaited(replica_id, control):  # it left while it waited: nothing loads
                self._devices.turns.exited(replica_id)
                self._devices.changed()
                return
        await control.call(self._settings.start_timeout_s, Replica.start)

    async def _leave(self, replica_id: int, control: ReplicaControl, *, stops: bool) -> None:
        """`stops`: the process is up and is asked to stop before it is killed."""
        # Phase 1: let the rollout side stop sending, and a publish end.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._clients.tell_soon()
                await self._quiet.wait()
        # Phase 2: end the process.
        if stops:
            try:
                await control.call(self._settings.stop_timeout_s, Replica.stop)
            except Exception as error:  # noqa: BLE001 - task boundary: it is killed in any case
                logger.info("while replica %d leaves: %s", replica_id, error)
        control.kill()
        if self._devices is not None:
            self._devices.turns.killed(replica_id)
        await self._exit(replica_id, control)
        # Phase 3: remove it from the table; without a `FleetSize` its place is filled again.
        self._membership.drop(replica_id)
        del self._controls[replica_id]
        self._details.pop(replica_id, None)
        self._changed.set()
        await self._clients.tell_soon()
        if not self._settings.is_resized:
            self.join(replica_id)

    async def _exit(self, replica_id: int, control: ReplicaControl) -> None:
        """Returns when a killed process has exited, and records it. A process that does not exit keeps its memory:
        the next `sleep` raises then."""
        try:
            await control.ended(EXIT_S, Replica.ping)
        except DeadlineExceeded:
            logger.exception("replica %d was killed and does not exit", replica_id)
            return
        if self._devices is not None:
            self._devices.turns.exited(replica_id)
            self._devices.changed()

    def _is_awaited(self, replica_id: int, control: ReplicaControl) -> bool:
        """True while this incarnation is wanted: not replaced, not leaving, and the pool goes on."""
        return bool(self._current({replica_id: control})) and not self._stopping and self.failure is None

    def _came_up(self, replica_id: int) -> None:
        self._membership.apply(replica_id, "started")
        if self._settings.serves_at_once:
            self._membership.apply(replica_id, "committed")
            self._details.pop(replica_id, None)

    def _tell_soon(self, replica_id: int) -> None:
        kept(self._tasks, self._clients.tell_soon(), f"tell of replica {replica_id}")

    async def _wait_change(self) -> None:
        """Returns when a replica came up; raises RunFailed when a replica is lost for good."""
        if self.failure is None:
            await self._changed.wait()
            self._changed.clear()
        if self.failure is not None:
            raise self.failure


Listener = Callable[[ReplicaTable], Awaitable[None]]


class PoolClients:
    """Sends the newest table to the listener, one call at a time. Remembers ended clients, so that a replica suspended
    at their end can forget them later."""

    def __init__(self, table: Callable[[], ReplicaTable], timeout_s: float) -> None:
        """
        Args:
            table: returns the present table.
            timeout_s: of a call to one replica.
        """
        self._table = table
        self._timeout_s = timeout_s
        self._listener: Listener | None = None
        self._told = -1
        """Generation of the table that the listener has."""
        self._turn = asyncio.Lock()
        self._forgotten: list[str] = []

    def listen(self, listener: Listener | None) -> None:
        """Sets the listener of the next `tell`; None: nobody."""
        self._listener, self._told = listener, -1

    def repeat(self) -> None:
        """Makes the next `tell` send the table even if unchanged: a connection can break although no process died."""
        self._told = -1

    async def tell(self) -> None:
        """Returns when the listener has the present table or a later one. Raises the listener's errors."""
        async with self._turn:
            listener, table = self._listener, self._table()
            if listener is not None and self._told != table.generation:
                await listener(table)
                if listener is self._listener:  # it may have been replaced during the call
                    self._told = table.generation

    async def tell_soon(self) -> None:
        """Like `tell`, but does not raise."""
        try:
            await self.tell()
        except Exception as error:  # noqa: BLE001 - task boundary: the next `tell` meets the same error, and raises
            logger.warning("the rollout side does not know of a change of the replicas yet: %s", error)

    async def forget(self, client_id: str, members: Mapping[int, ReplicaControl]) -> None:
        """Stops all work for this client, whose process has ended. Does not raise."""
        self._forgotten.append(client_id)
        calls = (control.call(self._timeout_s, Replica.forget_client, client_id) for control in members.values())
        for replica_id, outcome in zip(members, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                logger.warning("replica %d may still work for %s: %s", replica_id, client_id, outcome)

    async def forget_all(self, control: ReplicaControl) -> None:
        """Makes a returning replica stop all work for ended clients. Raises the error of a call."""
        for client_id in self._forgotten:
            await control.call(self._timeout_s, Replica.forget_client, client_id)
