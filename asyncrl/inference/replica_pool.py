"""The replicas of a run: started together, watched, set aside when they are late, replaced when they die or go wrong.

Consumes: failures that the health watch, the checkpoint engine or the coordinator see.
Produces: the members that a publish reaches, and a new replica for one that failed.
Waits for: starts (`start_timeout_s`), health checks (`health_timeout_s`), late replicas (`rejoin_timeout_s`).
Stops when: `stop` is called. `watch` raises when more replicas failed than the run may replace.

A replica starts with placeholder weights behind a closed gate. It is a *newcomer* until the checkpoint engine has
committed weights on it; only then requests are routed to it. One that answers too late (its process is stopped, say) is
*suspended*: nothing reaches it and nobody waits for it. When it answers again in time it forgets what it was asked
before and is a newcomer; else it is replaced.

One that is *leased* serves an evaluation and nobody else: requests of the rollout are withdrawn from it, and no publish
reaches it, so that it stays at its version. When the lease ends it is a newcomer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError, DeadlineExceeded, RunFailed, explain
from asyncrl.remote.restart_budget import RestartBudget
from asyncrl.types import ReplicaStats

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 0.2
"""What lies between two questions to a suspended replica when the first one was answered too late."""


class Control(Protocol):
    """What the pool itself calls of a replica, as `inference.replica_actor.ReplicaControl` reaches it."""

    async def start(self, timeout_s: float) -> ReplicaStats: ...

    async def stats(self, timeout_s: float) -> ReplicaStats: ...

    async def reset(self, timeout_s: float) -> None: ...

    async def forget_client(self, client_id: str, timeout_s: float) -> None: ...

    async def stop(self, timeout_s: float) -> None: ...

    def abandon(self) -> Control:
        """Ends every call in progress, and every later one, with DeadlineExceeded; returns a control to go on with."""
        ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`max_restarts`: replacements within `window_s`; times are seconds, meant as in `ray:` and `recovery:`.

    `rejoin_timeout_s`: how long a late replica may take to answer again; 0 replaces it at once. `restart_delay_s`: what
    a replica waits that failed before it had served, doubled with each time in a row: memory and processes of the one
    before may take a while to go.
    """

    max_restarts: int
    start_timeout_s: float
    health_interval_s: float
    health_timeout_s: float
    restart_delay_s: float = 1.0
    window_s: float = math.inf
    rejoin_timeout_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Member:
    """One incarnation of a replica."""

    control: Control
    up: bool = False
    serving: bool = False
    served: bool = False
    """Whether it has ever been serving."""
    routed: bool = False
    """Whether the rollout side sends requests to it, or is being told to."""
    leased: bool = False
    """Whether an evaluation has it; then it is not `serving`, and not `routed`."""
    version: int | None = None
    """What `release` said that it serves; without rolling publishes nothing has to know."""
    failures: int = 0
    """Incarnations before this one that failed in a row without having served."""


Routing = Callable[..., Coroutine[Any, Any, None]]


async def _nothing(*_: Any) -> None:
    """Tells nobody."""


class ReplicaPool:
    """Args:
    spawn: makes the process of replica i, not started.
    announce: (i, control, version) tells the rollout side that replica i serves, from now on or again.
    retire: (i) tells the rollout side to send nothing to replica i any more, which has failed; (i, lives=True) to
        withdraw what it had sent too, from one that lives on but is leased.
    hold, release: ([i], ([i], version)) tell it to send no new requests to these while a rolling publish reaches them,
        and to send them again.
    on_event: writes an event, as `EventLog.write`.
    """

    def __init__(
        self,
        spawn: Callable[[int], Any],
        num_replicas: int,
        settings: PoolSettings,
        *,
        announce: Routing,
        retire: Routing,
        hold: Routing = _nothing,
        release: Routing = _nothing,
        on_event: Callable[..., None],
    ) -> None:
        self._spawn = spawn
        self._settings = settings
        self._announce = announce
        self._retire = retire
        self._hold = hold
        self._release = release
        self._retiring: set[asyncio.Task[None]] = set()
        self._on_event = on_event
        self._members = {i: _Member(spawn(i)) for i in range(num_replicas)}
        self._budget = RestartBudget(settings.max_restarts, settings.window_s)
        self._forgotten: list[str] = []
        """Clients that no replica may work for, also one that was suspended when they ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: RunFailed | None = None
        self._stopping = False

    @property
    def controls(self) -> dict[int, Any]:
        """Every replica, whatever its state."""
        return {i: m.control for i, m in self._members.items()}

    @property
    def members(self) -> dict[int, Any]:
        """The replicas that are up and not leased: a publish reaches them."""
        return {i: m.control for i, m in self._members.items() if m.up and not m.leased}

    @property
    def newcomers(self) -> dict[int, Any]:
        """Those that are up and have no committed weights yet."""
        return {i: m.control for i, m in self._members.items() if m.up and not m.serving and not m.leased}

    @property
    def serving_members(self) -> dict[int, Any]:
        """Those that are up and have committed weights: requests are sent to them."""
        return {i: m.control for i, m in self._members.items() if m.up and m.serving}

    @property
    def leased(self) -> dict[int, Any]:
        """Those that an evaluation has, as long as they are up."""
        return {i: m.control for i, m in self._members.items() if m.leased}

    @property
    def serving(self) -> bool:
        """Whether any replica has committed weights."""
        return bool(self.serving_members)

    async def start(self) -> None:
        """Starts all of them at once. Raises what any of them raises: nothing is replaced before the run has begun."""

        async def one(member: _Member) -> None:
            await member.control.start(self._settings.start_timeout_s)
            member.up = True

        await asyncio.gather(*(one(member) for member in self._members.values()))

    def fail(self, replica_id: int, control: Any, why: BaseException | str) -> None:
        """Takes this incarnation of a replica out; a later one is left alone.

        One that is late (DeadlineExceeded) is suspended, if the settings give it time to rejoin. Any other is killed
        and begins to be replaced. When no replacement is left, `watch` and `wait_member` raise RunFailed.
        """
        member = self._members[replica_id]
        if member.control is not control or self._stopping or self._failure is not None:
            return
        if isinstance(why, DeadlineExceeded) and member.up and self._settings.rejoin_timeout_s > 0:
            self._suspend(replica_id, member, why)
        else:
            self._replace(replica_id, member, why)

    def _suspend(self, replica_id: int, member: _Member, why: BaseException) -> None:
        logger.warning("replica %d is late and suspended: %s", replica_id, why)
        self._on_event("replica_suspended", replica=replica_id, error=str(why))
        member.up, member.serving, member.version = False, False, None
        self._take_from_routing(replica_id, member)
        member.leased = False
        # Who still holds the former control, a publish say, is told apart from those that reach it after its return.
        member.control = member.control.abandon()
        self._spawn_task(self._rejoin(replica_id, member, why), f"rejoin replica {replica_id}")

    async def _rejoin(self, replica_id: int, member: _Member, why: BaseException) -> None:
        """Asks a suspended replica until it answers, and makes it a newcomer; replaces it when it is dead or takes too
        long."""
        loop, limit_s = asyncio.get_running_loop(), self._settings.rejoin_timeout_s
        deadline = loop.time() + limit_s
        control = member.control
        while True:
            try:
                await control.stats(max(0.01, min(deadline - loop.time(), self._settings.health_timeout_s)))
                await control.reset(max(deadline - loop.time(), self._settings.health_timeout_s))
                for client_id in self._forgotten:
                    await control.forget_client(client_id, self._settings.health_timeout_s)
            except DeadlineExceeded:
                if loop.time() < deadline:
                    await asyncio.sleep(min(ASK_AGAIN_S, max(0.0, deadline - loop.time())))
                    continue
                error: BaseException | str = f"it did not answer again within {limit_s:g} s; before that: {why}"
            except Exception as failure:  # noqa: BLE001 - task boundary: it becomes the failure of this replica
                error = failure
            else:
                self._admit(replica_id, member, "replica_rejoined")
                return
            if self._members[replica_id] is member and not self._stopping and self._failure is None:
                self._replace(replica_id, member, error)
            return

    def _replace(self, replica_id: int, member: _Member, why: BaseException | str) -> None:
        logger.error("replica %d has failed: %s", replica_id, why)
        self._on_event("replica_failed", replica=replica_id, error=str(why), restarts=self._budget.total)
        member.control.kill()
        self._take_from_routing(replica_id, member)
        member.up = member.leased = False
        if not self._budget.take():
            self._failure = RunFailed(
                explain(
                    f"replica {replica_id} to serve",
                    f"it failed after {self._budget.total} replacement(s) in this run, {self._budget}: {why}",
                    "see the log of the run; raise recovery.max_replica_restarts, or go on with resume=auto",
                )
            )
            self._changed.set()
            return
        failures = 0 if member.served else member.failures + 1
        replacement = _Member(self._spawn(replica_id), failures=failures)
        self._members[replica_id] = replacement
        self._spawn_task(self._start(replica_id, replacement), f"replace replica {replica_id}")

    def _take_from_routing(self, replica_id: int, member: _Member) -> None:
        if member.routed or member.leased:
            member.routed = False
            self._retiring.add(asyncio.create_task(self._retire(replica_id), name=f"retire replica {replica_id}"))

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

    async def committed(self, controls: Mapping[int, Any]) -> int:
        """These incarnations serve weights of the trainer now; returns how many of them have not failed meanwhile.

        When it returns the rollout side knows who serves, and sends nothing to those that failed. Raises what the
        rollout side raises.
        """
        await self._retired()
        for replica_id, control in controls.items():
            member = self._members[replica_id]
            if member.control is not control:
                continue
            if not member.routed:
                member.routed = True  # before: one that fails meanwhile has to be retired
                await self._announce(replica_id, control, member.version)
                if self._members[replica_id] is not member or member.control is not control:
                    continue
                self._on_event("replica_serving", replica=replica_id)
            member.serving = member.served = True
        await self._retired()
        return sum(self._members[i].control is control for i, control in controls.items())

    async def hold(self, controls: Mapping[int, Any]) -> None:
        """The rollout side sends no new request to these until `release`, while it has others."""
        if ids := self._routed(controls):
            await self._hold(ids)

    async def release(self, controls: Mapping[int, Any], version: int | None) -> None:
        """The rollout side sends requests to these again, which serve `version` (None: the one they had)."""
        if ids := self._routed(controls):
            for i in ids:
                self._members[i].version = self._members[i].version if version is None else version
            await self._release(ids, version)

    async def lease(self, count: int) -> dict[int, Any]:
        """Takes up to `count` serving replicas out of rollout and publishes, but never the last one; those that it got.

        Not while a publish is under way. Raises what the rollout side raises.
        """
        serving = self.serving_members
        count = min(count, len(serving) - 1)
        chosen = sorted(serving)[len(serving) - count :] if count > 0 else []
        for i in chosen:
            member = self._members[i]
            member.leased, member.serving, member.routed = True, False, False
            self._on_event("replica_leased", replica=i)
        await asyncio.gather(*(self._retire(i, lives=True) for i in chosen))
        return {i: control for i, control in self.leased.items() if serving.get(i) is control}

    async def end_lease(self, controls: Mapping[int, Any]) -> None:
        """These are newcomers again, those of them that are still leased. Does not raise: one that does not answer has
        failed."""

        async def one(replica_id: int, member: _Member) -> None:
            control = member.control
            try:
                await control.reset(self._settings.health_timeout_s)
            except Exception as error:  # noqa: BLE001 - task boundary: it becomes the failure of this replica
                self.fail(replica_id, control, error)
                return
            if member.leased and member.control is control:
                member.leased = False
                self._on_event("replica_returned", replica=replica_id)

        members = {i: self._members[i] for i, control in controls.items() if self.leased.get(i) is control}
        await asyncio.gather(*(one(i, member) for i, member in members.items()))

    def _routed(self, controls: Mapping[int, Any]) -> list[int]:
        members = self._members
        return [i for i, control in controls.items() if members[i].control is control and members[i].routed]

    async def forget_client(self, client_id: str) -> None:
        """No replica works for this client any more, whose process is gone. Does not raise: a replica that fails here
        is found by its next health check."""
        self._forgotten.append(client_id)
        timeout_s, members = self._settings.health_timeout_s, self.members | self.leased
        calls = (control.forget_client(client_id, timeout_s) for control in members.values())
        for replica_id, outcome in zip(members, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                logger.warning("replica %d may still work for %s: %s", replica_id, client_id, outcome)

    async def fence(self) -> None:
        """Every replica closes its gate, forgets what it was asked and is a newcomer until the next publish.

        For a training side that begins anew behind the published version: what the replicas hold belongs to a branch
        that is gone. The rollout side that was told of them is gone too, and is told nothing.
        """

        async def one(replica_id: int, member: _Member) -> None:
            control = member.control
            try:
                await control.reset(self._settings.health_timeout_s)
            except AsyncRLError as error:
                self.fail(replica_id, control, error)

        retiring, self._retiring = self._retiring, set()
        for task in retiring:
            task.cancel()
        for member in self._members.values():
            member.serving = member.routed = member.leased = False
            member.version = None
        await asyncio.gather(*retiring, return_exceptions=True)
        await asyncio.gather(*(one(i, m) for i, m in list(self._members.items()) if m.up))

    async def _retired(self) -> None:
        while self._retiring:
            await asyncio.gather(*self._retiring)
            self._retiring = {task for task in self._retiring if not task.done()}

    async def reconcile(self, known: Collection[int]) -> None:
        """Announces again what serves and the rollout side has lost: a connection may break that no process died of.
        `known`: the replicas that it sends requests to. Raises what it raises."""
        for replica_id, member in list(self._members.items()):
            if member.up and member.serving and replica_id not in known:
                logger.warning("replica %d serves, but requests no longer reached it", replica_id)
                await self._announce(replica_id, member.control, member.version)

    async def watch(self) -> None:
        """Checks the health of every member until it is cancelled. Raises RunFailed when a replica failed that may not
        be replaced any more."""
        while True:
            try:
                async with asyncio.timeout(self._settings.health_interval_s):
                    await self._wait_change()
            except TimeoutError:
                await self.stats()

    async def stats(self) -> list[ReplicaStats]:
        """Of every member that answers, also in the middle of a publish; one that does not is taken out (`fail`)."""

        async def one(replica_id: int, control: Any) -> ReplicaStats | None:
            try:
                return await control.stats(self._settings.health_timeout_s)
            except AsyncRLError as error:
                self.fail(replica_id, control, error)
                return None

        answers = await asyncio.gather(*(one(i, control) for i, control in (self.members | self.leased).items()))
        return [a for a in answers if a is not None]

    async def stop(self, timeout_s: float) -> None:
        """Asks every replica to stop, then kills it; none is replaced any more."""
        self._stopping = True
        tasks = self._tasks | self._retiring
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        controls = list(self.controls.values())
        for outcome in await asyncio.gather(*(c.stop(timeout_s) for c in controls), return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.info("while stopping: %s", outcome)
        for control in controls:
            control.kill()

    async def _start(self, replica_id: int, member: _Member) -> None:
        if member.failures:
            await asyncio.sleep(self._settings.restart_delay_s * 2 ** (member.failures - 1))
        try:
            await member.control.start(self._settings.start_timeout_s)
        except Exception as error:  # noqa: BLE001 - task boundary: it becomes the failure of this replica
            self.fail(replica_id, member.control, error)
            return
        self._admit(replica_id, member, "replica_started")

    def _admit(self, replica_id: int, member: _Member, event: str) -> None:
        """From now on it is up, unless it was replaced meanwhile."""
        if self._members[replica_id] is member and not self._stopping and self._failure is None:
            member.up = True
            self._on_event(event, replica=replica_id)
            self._changed.set()

    def _spawn_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_change(self) -> None:
        """Returns when a replica came up; raises RunFailed when one is lost for good."""
        if self._failure is None:
            await self._changed.wait()
            self._changed.clear()
        if self._failure is not None:
            raise self._failure
