"""The replicas of a run or a server: started together, watched, suspended when late, replaced when dead or wrong.

`inference.membership` decides the states. The pool does what follows from them: it starts, checks, resets and kills
processes. The listener, which routes requests, gets the whole table after each change and computes the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any

from asyncrl.driver.fleet.membership import Membership
from asyncrl.driver.fleet.pool_settings import ASK_AGAIN_S, AWAY_AFTER, EXIT_S, LEAVE_S, SLEEP_S, PoolSettings
from asyncrl.driver.fleet.shared_devices import SharedDevices
from asyncrl.errors import AsyncRLError, ConfigError, DeadlineExceeded, NoPlace, RunFailed, explain
from asyncrl.remote.failure_policy import FailureAction, failure_action
from asyncrl.remote.restart_budget import RestartBudget
from asyncrl.remote.waits import replica
from asyncrl.types import ReplicaHandle, ReplicaRow, ReplicaState, ReplicaStats, ReplicaTable, events

logger = logging.getLogger(__name__)

UP: tuple[ReplicaState, ...] = ("newcomer", "serving", "held")
ROUTED: tuple[ReplicaState, ...] = ("serving", "held")

Listener = Callable[[ReplicaTable], Awaitable[None]]


class ReplicaPool:
    """Owns the processes of the replicas, their states and the budget for replacing them.

    Consumes: failures that its health watch, the checkpoint engine and the coordinator report.
    Produces: the members that a publish reaches; a replacement for each replica that failed; the end of each that was
    asked to leave, by its machine or by `leave`; the replica table.
    Waits for: health checks, every `health_interval_s` and at most `health_timeout_s`; starts, at most
    `start_timeout_s`; suspended replicas, at most `rejoin_timeout_s`.
    Unblocked by: the answers of the replicas.
    Stops when: `stop` is called. `watch` raises once a replica has failed that the budget does not replace.
    """

    def __init__(
        self,
        spawn: Callable[[int], ReplicaHandle],
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
            devices: the devices that the replicas share with the trainer; None: they have their own.
        """
        self._spawn = spawn
        self._settings = settings
        self._on_event = on_event
        self._devices = devices
        self._controls: dict[int, ReplicaHandle] = {i: spawn(i) for i in range(num_replicas)}
        self._budget = RestartBudget(settings.max_restarts, settings.window_s)
        self._membership = Membership(self._controls, self._budget, restart_delay_s=settings.restart_delay_s)
        self._details: dict[int, str] = {}
        """Why a replica was suspended or replaced, until it serves again."""
        self._listener: Listener | None = None
        self._told = -1
        """Generation of the table that the listener has."""
        self._telling = asyncio.Lock()
        self._forgotten: list[str] = []
        """Clients that no replica may work for, also one that was suspended when they ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._quiet = asyncio.Event()
        """Set while no publish is in progress."""
        self._quiet.set()
        self._failure: RunFailed | None = None
        self._stopping = False

    # -- who is there --------------------------------------------------------------------------------------------

    @property
    def controls(self) -> dict[int, ReplicaHandle]:
        """Every replica, whatever its state."""
        return dict(self._controls)

    @property
    def members(self) -> dict[int, ReplicaHandle]:
        """The replicas that are up and not leased: a publish reaches them."""
        return self._those(*UP)

    @property
    def newcomers(self) -> dict[int, ReplicaHandle]:
        """Those that are up and have no committed weights yet."""
        return self._those("newcomer")

    @property
    def serving(self) -> dict[int, ReplicaHandle]:
        """Those that have committed weights: requests are sent to them."""
        return self._those(*ROUTED)

    @property
    def leased(self) -> dict[int, ReplicaHandle]:
        """Those that an evaluation has, as long as they are up."""
        return self._those("leased")

    @property
    def table(self) -> ReplicaTable:
        """All of them, as the listener gets it."""
        members = self._membership.members
        asleep = frozenset[int]() if self._devices is None else self._devices.turns.asleep
        return ReplicaTable(
            self._membership.generation,
            {
                i: ReplicaRow(
                    self._controls[i], m.state, m.incarnation, m.version, self._details.get(i, ""), i in asleep
                )
                for i, m in members.items()
            },
        )

    async def set_listener(self, listener: Listener | None) -> None:
        """Sends the table to this listener, now and after each change; None sends it to nobody. Raises what the
        listener raises."""
        self._listener, self._told = listener, -1
        await self._tell()

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all of them at once, and begins to replace those that fail, as long as a quorum can come up: of many
        machines one is always ill. Returns when the others are up. Raises what one replica too many raises, and a
        ConfigError, which every other one would raise too."""
        controls, failed = self.controls, dict[int, Exception]()
        spare = 0 if self._settings.quorum is None else len(controls) - self._settings.quorum

        async def one(replica_id: int, control: ReplicaHandle) -> None:
            try:
                await self._load(replica_id, control)
            except ConfigError:
                raise
            except Exception as error:
                if len(failed) >= spare:
                    raise
                failed[replica_id] = error
            else:
                self._came_up(replica_id)

        await asyncio.gather(*(one(i, control) for i, control in controls.items()))
        for replica_id, error in failed.items():
            self.fail(replica_id, controls[replica_id], error)

    def fail(self, replica_id: int, control: ReplicaHandle, why: BaseException | str) -> None:
        """Takes this incarnation of a replica out; a later one is left alone.

        One that is late (DeadlineExceeded) is suspended, if the settings give it time to rejoin. Any other is killed
        and begins to be replaced. When no replacement is left, `watch` and `wait_member` raise RunFailed.
        """
        if not self._is_awaited(replica_id, control):
            return
        may_rejoin = self._settings.rejoin_timeout_s > 0 and self._membership.may(replica_id, "late")
        action = failure_action(replica(replica_id), why, restarts_left=True, may_rejoin=may_rejoin)
        if action is FailureAction.SUSPEND_REPLICA:
            self._suspend(replica_id, control, why)
        else:
            self._replace(replica_id, control, why)

    async def wait_member(self, timeout_s: float) -> None:
        """Returns when at least one replica is up. Raises RunFailed, DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.members:
                    await self._wait_change()
        except TimeoutError:
            raise DeadlineExceeded(
                explain("a replica to publish to", f"none was up within {timeout_s:.1f} s", "see the log of the run")
            ) from None

    async def watch(self) -> None:
        """Checks the health of every member until it is cancelled, and sends the table again: a connection can break
        although no process died. Raises RunFailed when a replica has failed and the budget is spent."""
        while True:
            try:
                async with asyncio.timeout(self._settings.health_interval_s):
                    await self._wait_change()
            except TimeoutError:
                await self.stats()
                self._told = -1
                await self._tell()

    async def stats(self) -> list[ReplicaStats]:
        """Statistics of every member that answers, also in the middle of a publish. A member that does not answer has
        failed (`fail`); one whose process was asked to end leaves."""

        async def one(replica_id: int, control: ReplicaHandle) -> ReplicaStats | None:
            try:
                found = await control.stats(self._settings.health_timeout_s)
            except AsyncRLError as error:
                self.fail(replica_id, control, error)
                return None
            if found.must_leave and self._is_awaited(replica_id, control):
                self.leave(replica_id, "preempted")
            return found

        answers = await asyncio.gather(*(one(i, control) for i, control in (self.members | self.leased).items()))
        return [a for a in answers if a is not None]

    async def stop(self, timeout_s: float) -> None:
        """Asks every replica to stop, then kills it; none is replaced any more."""
        self._stopping = True
        await self._cancel_tasks()
        controls = list(self._controls.values())
        for outcome in await asyncio.gather(*(c.stop(timeout_s) for c in controls), return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.info("while stopping: %s", outcome)
        for control in controls:
            control.kill()

    # -- joining and leaving ------------------------------------------------------------------------------------

    def join(self, replica_id: int) -> None:
        """Adds a replica that is not there and begins to start it; it serves from its first publish on. Does nothing in
        a pool that is at its end. Raises ValueError: it is there."""
        if self._stopping or self._failure is not None:
            return
        self._membership.require_free(replica_id)
        control = self._controls[replica_id] = self._spawn(replica_id)  # before it is a member: it may fail
        self._membership.add(replica_id)
        self._on_event(events.ReplicaJoined(replica_id))
        self._spawn_task(self._start(replica_id, control, 0.0), f"start replica {replica_id}")
        self._spawn_task(self._tell_soon(), f"tell of replica {replica_id}")

    def leave(self, replica_id: int, why: events.Departure) -> None:
        """Begins to take a replica out: no new request goes to it, those in flight resume elsewhere with their tokens,
        and its process is stopped once no publish is in progress, `LEAVE_S` later at the latest. It costs no restart.
        Then it is in the table no more. Does nothing for one that leaves already, and in a pool at its end."""
        member = self._membership.members.get(replica_id)
        if member is None or member.state == "leaving" or self._stopping or self._failure is not None:
            return
        logger.info("replica %d leaves: %s", replica_id, why)
        was_up = member.state not in ("starting", "dead")
        self._membership.apply(replica_id, "leave")
        self._on_event(events.ReplicaLeft(replica_id, why))
        leaves = self._leave(replica_id, self._controls[replica_id], stops=was_up)
        self._spawn_task(leaves, f"leave of replica {replica_id}")

    # -- publishes -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """A publish is in progress: replicas that leave stay until its end, since it would wait for them."""
        self._quiet.clear()
        try:
            yield
        finally:
            self._quiet.set()

    async def hold(self, controls: Mapping[int, ReplicaHandle]) -> None:
        """A rolling publish reaches these next: no new request goes to them until they have committed, unless every
        replica is held. Returns when the listener has the table. Raises what the listener raises."""
        for replica_id in self._current(controls):
            if self._membership.may(replica_id, "hold"):
                self._membership.apply(replica_id, "hold")
        await self._tell()

    async def committed(self, controls: Mapping[int, ReplicaHandle], version: int | None = None) -> int:
        """Records that these incarnations serve the trainer's weights; returns how many of them have not failed since.

        Returns when the listener has the table, and so sends nothing to those that failed. Raises what the listener
        raises.

        Args:
            version: the version that they serve; None where all serving replicas have the same one.
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
        await self._tell()
        return len(self._current(controls))

    async def sleep(self) -> None:
        """Returns when the trainer may have the devices: every engine that was up sleeps, and every other process has
        exited. Requests in flight end with the tokens that they have, and wait for the next publish.

        A replica that loads is waited for. One that is late, or cannot sleep, is killed; it is replaced after the next
        `wake`. Raises RunFailed; DeadlineExceeded: an engine still holds memory; what the listener raises.
        """
        devices, loop = self._shared(), asyncio.get_running_loop()
        devices.turns.rest()
        limit_s = self._settings.start_timeout_s + SLEEP_S + EXIT_S
        deadline = loop.time() + limit_s
        while awake := devices.turns.awake:
            if self._failure is not None:
                raise self._failure
            if loop.time() > deadline:
                asked, found = "the trainer's turn on the devices", f"replicas {sorted(awake)} hold memory of them"
                do = "see the log of the run for why they neither sleep nor exit"
                raise DeadlineExceeded(explain(asked, f"{found} after {limit_s:g} s", do))
            for replica_id in set(self._those("suspended")) & awake:
                self._replace(replica_id, self._controls[replica_id], "it answers late, and the trainer needs its turn")
            up = {i: control for i, control in self.members.items() if i in awake}
            await asyncio.gather(*(self._put_to_sleep(i, control) for i, control in up.items()))
            if devices.turns.awake:
                await devices.change(ASK_AGAIN_S)
        devices.turns.train()
        self._membership.generation += 1
        await self._tell()

    async def wake(self) -> None:
        """The engines have the devices again: a publish follows, which wakes them. Replacements may load. Does nothing
        while the engines generate: they are awake.

        Raises what the listener raises.
        """
        devices = self._shared()
        if devices.turns.phase == "generating":
            return
        devices.turns.wake()
        devices.changed()
        self._membership.generation += 1
        await self._tell()

    async def fence(self) -> None:
        """Makes every replica a newcomer: it closes its gate and drops its requests until the next publish.

        Needed when the training side restarts from a checkpoint before the published version: the replicas hold weights
        of steps that were undone. Also drops the listener: set the next one afterwards.
        """
        self._listener = None
        up = self.members | self.leased
        for replica_id in up:
            self._membership.apply(replica_id, "fenced")
        await asyncio.gather(*(self._reset(i, control) for i, control in up.items()))

    # -- evaluations and clients ---------------------------------------------------------------------------------

    async def lease(self, count: int) -> dict[int, ReplicaHandle]:
        """Takes up to `count` serving replicas, but never the last one, out of rollout and publishes; returns them.

        Must not be called during a publish. Raises what the listener raises.
        """
        free = self._those("serving")
        count = min(count, len(free) - 1)
        chosen = sorted(free)[len(free) - count :] if count > 0 else []
        for replica_id in chosen:
            self._membership.apply(replica_id, "lease")
            self._on_event(events.ReplicaLeased(replica_id))
        await self._tell()
        return {i: control for i, control in self.leased.items() if i in chosen and free[i] is control}

    async def end_lease(self, controls: Mapping[int, ReplicaHandle]) -> None:
        """Makes those of these that are still leased newcomers. Does not raise: a replica that does not answer has
        failed."""

        async def one(replica_id: int, control: ReplicaHandle) -> None:
            if await self._reset(replica_id, control, becomes=1) and self.leased.get(replica_id) is control:
                self._membership.apply(replica_id, "lease_ended")
                self._on_event(events.ReplicaReturned(replica_id))

        leased = {i: control for i, control in controls.items() if self.leased.get(i) is control}
        await asyncio.gather(*(one(i, control) for i, control in leased.items()))

    async def forget_client(self, client_id: str) -> None:
        """Stops all work for this client, whose process has ended. Does not raise: the next health check finds a
        replica that fails here."""
        self._forgotten.append(client_id)
        timeout_s, members = self._settings.health_timeout_s, self.members | self.leased
        calls = (control.forget_client(client_id, timeout_s) for control in members.values())
        for replica_id, outcome in zip(members, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                logger.warning("replica %d may still work for %s: %s", replica_id, client_id, outcome)

    # -- inside --------------------------------------------------------------------------------------------------

    def _those(self, *states: ReplicaState) -> dict[int, ReplicaHandle]:
        return {i: self._controls[i] for i in self._membership.those(*states)}

    def _current(self, controls: Mapping[int, ReplicaHandle]) -> list[int]:
        """Those of `controls` that have not been replaced or suspended since, and do not leave."""
        return [i for i, control in controls.items() if self._controls.get(i) is control and not self._leaves(i)]

    def _leaves(self, replica_id: int) -> bool:
        return self._membership.members[replica_id].state == "leaving"

    async def _tell(self) -> None:
        """Returns when the listener has the table as it is now, or a later one. Raises what the listener raises."""
        async with self._telling:
            listener = self._listener
            if listener is not None and self._told != self._membership.generation:
                table = self.table
                await listener(table)
                if listener is self._listener:  # another one may have taken its place during the call
                    self._told = table.generation

    async def _tell_soon(self) -> None:
        try:
            await self._tell()
        except Exception as error:  # noqa: BLE001 - task boundary: the next call of `_tell` meets the same, and raises
            logger.warning("the rollout side does not know of a change of the replicas yet: %s", error)

    async def _reset(self, replica_id: int, control: ReplicaHandle, becomes: int = 0) -> bool:
        """True when the replica, `becomes` incarnations later, has forgotten its requests; else it has failed."""
        try:
            incarnation = self._membership.members[replica_id].incarnation + becomes
            await control.reset(self._settings.health_timeout_s, incarnation)
        except Exception as error:  # noqa: BLE001 - task boundary: it becomes the failure of this replica
            self.fail(replica_id, control, error)
            return False
        return True

    def _suspend(self, replica_id: int, control: ReplicaHandle, why: BaseException | str) -> None:
        logger.warning("replica %d is late and suspended: %s", replica_id, why)
        self._on_event(events.ReplicaSuspended(replica_id, str(why)))
        self._membership.apply(replica_id, "late")
        self._details[replica_id] = str(why)
        # A new control: calls of a publish that still holds the former one cannot reach the replica after it rejoined.
        self._controls[replica_id] = control.abandon()
        self._spawn_task(self._rejoin(replica_id, self._controls[replica_id], why), f"rejoin replica {replica_id}")
        self._spawn_task(self._tell_soon(), f"tell of replica {replica_id}")

    async def _rejoin(self, replica_id: int, control: ReplicaHandle, why: BaseException | str) -> None:
        """Checks a suspended replica until it answers, then makes it a newcomer; replaces one that is dead or late."""
        loop, limit_s = asyncio.get_running_loop(), self._settings.rejoin_timeout_s
        deadline, incarnation = loop.time() + limit_s, self._membership.members[replica_id].incarnation + 1
        while True:
            try:
                await control.stats(max(0.01, min(deadline - loop.time(), self._settings.health_timeout_s)))
                await control.reset(max(deadline - loop.time(), self._settings.health_timeout_s), incarnation)
                for client_id in self._forgotten:
                    await control.forget_client(client_id, self._settings.health_timeout_s)
            except DeadlineExceeded:
                if loop.time() < deadline:
                    await asyncio.sleep(min(ASK_AGAIN_S, max(0.0, deadline - loop.time())))
                    continue
                self.fail(replica_id, control, f"it did not answer again within {limit_s:g} s; before that: {why}")
            except Exception as failure:  # noqa: BLE001 - task boundary: it becomes the failure of this replica
                self.fail(replica_id, control, failure)
            else:
                if self._is_awaited(replica_id, control):
                    self._membership.apply(replica_id, "answered")
                    self._on_event(events.ReplicaRejoined(replica_id))
                    self._changed.set()
            return

    def _replace(self, replica_id: int, control: ReplicaHandle, why: BaseException | str) -> None:
        if isinstance(why, NoPlace) and self._settings.is_resized and (self.members or self.leased):
            self.leave(replica_id, "no_place")  # it comes back when a node has room
            return
        logger.error("replica %d has failed: %s", replica_id, why)
        self._on_event(events.ReplicaFailed(replica_id, str(why), restarts=self._budget.total))
        control.kill()
        if self._devices is not None:
            self._devices.turns.killed(replica_id)
            self._spawn_task(self._exit(replica_id, control), f"exit of replica {replica_id}")
        self._membership.apply(replica_id, "failed")
        self._details[replica_id] = str(why)
        if self._stays_away(replica_id):
            logger.error("replica %d did not start and stays away; the others go on", replica_id)
            self._changed.set()
            self._spawn_task(self._tell_soon(), f"tell of replica {replica_id}")
            return
        delay_s = self._membership.replace(replica_id)
        if delay_s is None:
            self._failure = RunFailed(
                explain(
                    f"replica {replica_id} to serve",
                    f"it failed after {self._budget.total} replacement(s) in this run, {self._budget}: {why}",
                    "see the log of the run; raise recovery.max_replica_restarts, or go on with resume=auto",
                )
            )
            self._changed.set()
        else:
            self._controls[replica_id] = self._spawn(replica_id)
            start = self._start(replica_id, self._controls[replica_id], delay_s)
            self._spawn_task(start, f"replace replica {replica_id}")
        self._spawn_task(self._tell_soon(), f"tell of replica {replica_id}")

    def _stays_away(self, replica_id: int) -> bool:
        """True for one that never came up, while a quorum is up: trying again would spend the budget of the others."""
        member, quorum = self._membership.members[replica_id], self._settings.quorum
        if (
            member.served
            or member.failures < AWAY_AFTER
            or quorum is None
            or len(self.members) + len(self.leased) < quorum
        ):
            return False
        return self._budget.take()

    async def _start(self, replica_id: int, control: ReplicaHandle, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            await self._load(replica_id, control)
        except Exception as error:  # noqa: BLE001 - task boundary: it becomes the failure of this replica
            self.fail(replica_id, control, error)
            return
        if self._is_awaited(replica_id, control):
            self._came_up(replica_id)
            self._on_event(events.ReplicaStarted(replica_id))
            self._changed.set()
            self._spawn_task(self._tell_soon(), f"tell of replica {replica_id}")

    async def _load(self, replica_id: int, control: ReplicaHandle) -> None:
        """Starts a replica once it has a place, in the engines' turn where the devices are shared. Raises what its
        start raises, NoPlace."""
        await control.placed(self._settings.start_timeout_s)
        if self._devices is not None:
            await self._devices.turn_to_load(replica_id)
            if not self._is_awaited(replica_id, control):  # it has left while it waited: nothing loads
                self._devices.turns.exited(replica_id)
                self._devices.changed()
                return
        await control.start(self._settings.start_timeout_s)

    async def _leave(self, replica_id: int, control: ReplicaHandle, *, stops: bool) -> None:
        """`stops`: its process is up, and is asked to stop before it is killed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._tell_soon()
                await self._quiet.wait()
        if stops:
            try:
                await control.stop(self._settings.stop_timeout_s)
            except Exception as error:  # noqa: BLE001 - task boundary: it is killed in any case
                logger.info("while replica %d leaves: %s", replica_id, error)
        control.kill()
        if self._devices is not None:
            self._devices.turns.killed(replica_id)
        await self._exit(replica_id, control)
        self._membership.drop(replica_id)
        del self._controls[replica_id]
        self._details.pop(replica_id, None)
        self._changed.set()
        await self._tell_soon()
        if not self._settings.is_resized:
            self.join(replica_id)

    async def _put_to_sleep(self, replica_id: int, control: ReplicaHandle) -> None:
        """One that does not sleep in time is killed: it would keep its memory."""
        try:
            await control.sleep(SLEEP_S)
        except Exception as error:  # noqa: BLE001 - task boundary: it becomes the failure of this replica
            if self._is_awaited(replica_id, control):
                self._replace(replica_id, control, error)
        else:
            if self._controls.get(replica_id) is control and replica_id in self.members:
                self._shared().turns.slept(replica_id)

    async def _exit(self, replica_id: int, control: ReplicaHandle) -> None:
        """Returns when a killed process has exited, and books it. One that does not exit keeps its memory: the next
        `sleep` raises then."""
        try:
            await control.ended(EXIT_S)
        except DeadlineExceeded:
            logger.exception("replica %d was killed and does not exit", replica_id)
            return
        if self._devices is not None:
            self._devices.turns.exited(replica_id)
            self._devices.changed()

    def _shared(self) -> SharedDevices:
        assert self._devices is not None, "the replicas have devices of their own"
        return self._devices

    def _is_awaited(self, replica_id: int, control: ReplicaHandle) -> bool:
        """True while this incarnation is wanted: it has not been replaced and does not leave, and the pool goes on."""
        return bool(self._current({replica_id: control})) and not self._stopping and self._failure is None

    def _came_up(self, replica_id: int) -> None:
        self._membership.apply(replica_id, "started")
        if self._settings.serves_at_once:
            self._membership.apply(replica_id, "committed")
            self._details.pop(replica_id, None)

    def _spawn_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_change(self) -> None:
        """Returns when a replica came up; raises RunFailed when one is lost for good."""
        if self._failure is None:
            await self._changed.wait()
            self._changed.clear()
        if self._failure is not None:
            raise self._failure
