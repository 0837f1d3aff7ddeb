"""The replicas of a run: started together, watched, and replaced when they die or go wrong.

Consumes: failures that the health watch, the checkpoint engine or the coordinator see.
Produces: the members that a publish reaches, and a new replica for one that failed.
Waits for: starts (`start_timeout_s`) and health checks (`health_timeout_s`).
Stops when: `stop` is called. `watch` raises when more replicas failed than the run may replace.

A replacement starts with placeholder weights behind a closed gate. It is a *newcomer* until the checkpoint engine has
committed weights on it; only then requests are routed to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError, DeadlineExceeded, RunFailed, explain
from asyncrl.inference.replica import ReplicaStats
from asyncrl.types import Manifest, PauseMode
from asyncrl.weights.transport import Digest, TransferSource

logger = logging.getLogger(__name__)


class Control(Protocol):
    """One replica, as `inference.channel.ReplicaControl` reaches it."""

    async def start(self, timeout_s: float) -> ReplicaStats: ...

    async def pause(self, mode: PauseMode, timeout_s: float) -> None: ...

    async def receive_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None: ...

    async def commit(self, publish_id: int, version: int | None, digest: Digest | None, timeout_s: float) -> None: ...

    async def stats(self, timeout_s: float) -> ReplicaStats: ...

    async def stop(self, timeout_s: float) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`max_restarts`: replacements in a run; times are seconds, meant as in `ray:` of a recipe.

    `restart_delay_s`: what a replica waits that failed before it had served, doubled with each time in a row: memory
    and processes of the one before may take a while to go.
    """

    max_restarts: int
    start_timeout_s: float
    health_interval_s: float
    health_timeout_s: float
    restart_delay_s: float = 1.0


@dataclass(slots=True, eq=False)
class _Member:
    """One incarnation of a replica."""

    control: Control
    up: bool = False
    serving: bool = False
    routed: bool = False
    """Whether the rollout side sends requests to it, or is being told to."""
    failures: int = 0
    """Incarnations before this one that failed in a row without having served."""


class ReplicaPool:
    """Args:
    spawn: makes the process of replica i, not started.
    announce: tells the rollout side that replica i serves again.
    retire: tells the rollout side to send nothing to replica i any more.
    on_event: writes an event, as `EventLog.write`.
    """

    def __init__(
        self,
        spawn: Callable[[int], Any],
        num_replicas: int,
        settings: PoolSettings,
        *,
        announce: Callable[[int, Any], Coroutine[Any, Any, None]],
        retire: Callable[[int], Coroutine[Any, Any, None]],
        on_event: Callable[..., None],
    ) -> None:
        self._spawn = spawn
        self._settings = settings
        self._announce = announce
        self._retire = retire
        self._retiring: set[asyncio.Task[None]] = set()
        self._on_event = on_event
        self._members = {i: _Member(spawn(i), routed=True) for i in range(num_replicas)}
        self._restarts = 0
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
        """The replicas that are up: a publish reaches them."""
        return {i: m.control for i, m in self._members.items() if m.up}

    @property
    def newcomers(self) -> dict[int, Any]:
        """Those that are up and have no committed weights yet."""
        return {i: m.control for i, m in self._members.items() if m.up and not m.serving}

    @property
    def serving(self) -> bool:
        """Whether any replica has committed weights."""
        return any(m.up and m.serving for m in self._members.values())

    async def start(self) -> None:
        """Starts all of them at once. Raises what any of them raises: nothing is replaced before the run has begun."""

        async def one(member: _Member) -> None:
            await member.control.start(self._settings.start_timeout_s)
            member.up = True

        await asyncio.gather(*(one(member) for member in self._members.values()))

    def fail(self, replica_id: int, control: Any, why: BaseException | str) -> None:
        """Kills this incarnation of a replica and begins to replace it; a later one is left alone.

        When no replacement is left, `watch` and `wait_member` raise RunFailed.
        """
        member = self._members[replica_id]
        if member.control is not control or self._stopping or self._failure is not None:
            return
        logger.error("replica %d has failed: %s", replica_id, why)
        self._on_event("replica_failed", replica=replica_id, error=str(why), restarts=self._restarts)
        control.kill()
        if member.routed:
            self._retiring.add(asyncio.create_task(self._retire(replica_id), name=f"retire replica {replica_id}"))
        if self._restarts >= self._settings.max_restarts:
            member.up = False
            self._failure = RunFailed(
                explain(
                    f"replica {replica_id} to serve",
                    f"it failed after {self._restarts} replacement(s) in this run: {why}",
                    "see the log of the run; raise recovery.max_replica_restarts, or go on with resume=auto",
                )
            )
            self._changed.set()
            return
        self._restarts += 1
        failures = 0 if member.serving else member.failures + 1
        replacement = _Member(self._spawn(replica_id), failures=failures)
        self._members[replica_id] = replacement
        task = asyncio.create_task(self._start(replica_id, replacement), name=f"replace replica {replica_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
            if member.control is not control or member.serving:
                continue
            if not member.routed:
                member.routed = True  # before: one that fails meanwhile has to be retired
                await self._announce(replica_id, control)
                if self._members[replica_id] is not member:
                    continue
                self._on_event("replica_serving", replica=replica_id)
            member.serving = True
        await self._retired()
        return sum(self._members[i].control is control for i, control in controls.items())

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
                await self._announce(replica_id, member.control)

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
        """Of every member that answers; one that does not is replaced."""

        async def one(replica_id: int, control: Any) -> ReplicaStats | None:
            try:
                return await control.stats(self._settings.health_timeout_s)
            except AsyncRLError as error:
                self.fail(replica_id, control, error)
                return None

        answers = await asyncio.gather(*(one(i, control) for i, control in self.members.items()))
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
        if self._members[replica_id] is member:
            member.up = True
            self._on_event("replica_started", replica=replica_id)
            self._changed.set()

    async def _wait_change(self) -> None:
        """Returns when a replica came up; raises RunFailed when one is lost for good."""
        if self._failure is None:
            await self._changed.wait()
            self._changed.clear()
        if self._failure is not None:
            raise self._failure
