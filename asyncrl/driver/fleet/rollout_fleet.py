"""The rollouters of a run as one: each has a supervisor, its part of the replicas, and its share of the groups."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.driver.rollouters import RolloutSupervisor
from asyncrl.rollout.at_once import all_at_once
from asyncrl.types import EvalResult, PartialGroup, ReplicaTable, RolloutStats


class RolloutFleet:
    """Owns the supervisors of all rollouters. The message queue gives each its share of the groups; each works with its
    part of the replica table."""

    def __init__(self, supervisors: Sequence[RolloutSupervisor]) -> None:
        self._members = tuple(supervisors)
        self._turns = itertools.cycle(self._members)

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The names of the current rollouters among the clients of the replicas."""
        return tuple(member.client_id for member in self._members)

    async def start(self, timeout_s: float) -> RolloutStats:
        """Starts all. Raises what the first one that fails raises."""
        return together(await all_at_once(member.start(timeout_s) for member in self._members))

    async def run(self) -> None:
        """Runs all, each as `RolloutSupervisor.run` does, until all are stopped. Raises the first error of any."""
        await all_at_once(member.run() for member in self._members)

    async def evaluate(self, name: str, seed: int, timeout_s: float, leased: ReplicaTable | None = None) -> EvalResult:
        """As `RolloutSupervisor.evaluate`, on one rollouter after the other."""
        return await next(self._turns).evaluate(name, seed, timeout_s, leased)

    async def set_replicas(self, table: ReplicaTable) -> None:
        await all_at_once(member.set_replicas(table) for member in self._members)

    async def set_pool(self, key: str, table: ReplicaTable) -> None:
        await all_at_once(member.set_pool(key, table) for member in self._members)

    async def partials(self, timeout_s: float) -> list[PartialGroup]:
        """The running groups of all."""
        found = await all_at_once(member.partials(timeout_s) for member in self._members)
        return list(itertools.chain.from_iterable(found))

    async def stats(self, timeout_s: float) -> RolloutStats:
        """The health check of all, and their statistics together."""
        return together(await all_at_once(member.stats(timeout_s) for member in self._members))

    async def stop(self, timeout_s: float) -> None:
        """Stops all, whatever the stop of one raises; raises the first error."""
        for outcome in await asyncio.gather(*(m.stop(timeout_s) for m in self._members), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def kill(self) -> None:
        for member in self._members:
            member.kill()

    async def ended(self, timeout_s: float) -> None:
        """Returns when all killed processes have exited. Raises DeadlineExceeded."""
        await all_at_once(member.ended(timeout_s) for member in self._members)


def together(stats: Sequence[RolloutStats]) -> RolloutStats:
    """The sums over all rollouters. `pid` is the sum of theirs: it changes when any of them is another process."""
    first, seconds = stats[0], Counter[str]()
    for one in stats:
        seconds.update(one.replica_s)
    return replace(
        first,
        pid=sum(one.pid for one in stats),
        groups=sum(one.groups for one in stats),
        requests=sum(one.requests for one in stats),
        replicas=tuple(sorted({i for one in stats for i in one.replicas})),
        cpu_s=sum(one.cpu_s for one in stats),
        workers_cpu_s=sum(one.workers_cpu_s for one in stats),
        reprefilled_tokens=sum(one.reprefilled_tokens for one in stats),
        cancelled_groups=sum(one.cancelled_groups for one in stats),
        replica_s=dict(seconds),
    )
