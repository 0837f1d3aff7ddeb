"""The broker: a thin asyncio shell around the ledger that also holds the tokens of finished groups.

Runs as a Ray actor. Every wait of a caller is a bounded long poll: it returns empty-handed after `wait_s`, so that
no caller ever depends on this process to answer late.

Group life-cycle events go to the run's `events.jsonl` from here, in the order of the transitions.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from asyncrl.errors import LedgerError, RunFailed, explain
from asyncrl.observability.events import EventLog
from asyncrl.queue.group_files import load_groups, save_groups
from asyncrl.queue.ledger import GroupEvent, Ledger, LedgerCounts, LedgerSnapshot
from asyncrl.queue.staleness import StalenessPolicy
from asyncrl.types import GroupSummary, LeaseManifest, Lengths, Ticket, TrajectoryGroup

MIN_ENDED_FOR_BUDGET = 32


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """`max_groups`: groups that the run trains in all. `dynamic_sampling`: groups of equal rewards end `filtered`."""

    groups_per_step: int
    max_lag: int
    max_groups: int
    max_attempts: int
    max_failed_fraction: float
    dynamic_sampling: bool
    events_path: Path


@dataclass(frozen=True, slots=True)
class LeaseWait:
    """Why a step has no groups yet. `overdue_s`: how long only mandatory groups have been missing."""

    missing: int
    overdue: int
    overdue_s: float
    counts: LedgerCounts


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A ready or leased group; `put_version` is the one published when it was put."""

    group: TrajectoryGroup
    put_version: int


class MessageQueue:
    def __init__(self, spec: QueueSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self._events = EventLog(spec.events_path)
        self._ledger = Ledger(
            StalenessPolicy(spec.groups_per_step, spec.max_lag),
            max_attempts=spec.max_attempts,
            max_groups=spec.max_groups,
            on_event=self._record,
        )
        self._stored: dict[int, StoredGroup] = {}
        self._changed = asyncio.Condition()
        self._overdue_since: float | None = None

    # -- rollout side --------------------------------------------------------------------------------------------

    async def admit(self, limit: int, wait_s: float) -> list[Ticket]:
        """Up to `limit` tickets; waits at most `wait_s` for the first one."""
        await self._wait(lambda: self._ledger.has_pending or self._ledger.admissible > 0, wait_s)
        return self._ledger.admit(limit)

    async def put(self, ticket: Ticket, group: TrajectoryGroup) -> None:
        """Raises LedgerError for a ticket that is not running; ValueError for a malformed group."""
        group.validate()
        if (group.ordinal, group.attempt) != (ticket.ordinal, ticket.attempt):
            raise LedgerError(f"put of group {group.ordinal}.{group.attempt} with the ticket of {ticket}")
        rewards = [t.reward for t in group.trajectories]
        has_signal = not self._spec.dynamic_sampling or min(rewards) != max(rewards)
        self._ledger.put(ticket, group.oldest_version, has_signal=has_signal)
        if has_signal:
            newest = max((s.version for t in group.trajectories for s in t.segments), default=0)
            self._stored[group.ordinal] = StoredGroup(group, max(self._ledger.version, newest))
        await self._notify()

    async def put_many(self, items: list[tuple[Ticket, TrajectoryGroup]]) -> list[Exception | None]:
        """`put` for each; returns what each raised, in order."""
        outcomes: list[Exception | None] = []
        for ticket, group in items:
            try:
                await self.put(ticket, group)
                outcomes.append(None)
            except Exception as e:  # noqa: BLE001 - task boundary: the caller of this put gets it, the others go on
                outcomes.append(e)
        return outcomes

    async def nack(self, ticket: Ticket, reason: str) -> bool:
        """The group raised `reason` (with its traceback). True: it will be issued again."""
        again = self._ledger.nack(ticket, reason)
        await self._notify()
        return again

    # -- training side -------------------------------------------------------------------------------------------

    async def lease(self, step: int, wait_s: float) -> LeaseManifest | LeaseWait:
        """The groups that `step` trains, or after `wait_s` why there are none yet.

        Raises RunFailed when more groups failed than the budget allows.
        """
        deadline = self._clock() + wait_s
        while True:
            self._check_failures()
            selection = self._ledger.lease(step)
            if selection.chosen:
                waited = 0.0 if self._overdue_since is None else self._clock() - self._overdue_since
                self._overdue_since = None
                return LeaseManifest(step, tuple(self._summary(o, step) for o in selection.chosen), waited)
            if selection.missing == 0 and self._overdue_since is None:
                self._overdue_since = self._clock()
            remaining = deadline - self._clock()
            if remaining <= 0:
                overdue_s = 0.0 if self._overdue_since is None else self._clock() - self._overdue_since
                return LeaseWait(selection.missing, selection.overdue, overdue_s, self._ledger.counts)
            await self._wait_change(remaining)

    async def fetch(self, ordinals: list[int]) -> list[TrajectoryGroup]:
        """The tokens of leased groups. Raises LedgerError naming an ordinal that is not leased."""
        for ordinal in ordinals:
            record = self._ledger.record(ordinal)
            if record is None or record.state != "leased":
                raise LedgerError(f"fetch of group {ordinal} refused: it is {record}")
        return [self._stored[ordinal].group for ordinal in ordinals]

    async def commit(self, step: int) -> LedgerCounts:
        for ordinal in self._ledger.commit(step):
            del self._stored[ordinal]
        await self._notify()
        return self._ledger.counts

    async def rollback(self, step: int) -> None:
        self._ledger.rollback(step)
        await self._notify()

    async def published(self, version: int) -> LedgerCounts:
        self._ledger.published(version)
        await self._notify()
        return self._ledger.counts

    async def wait_idle(self, wait_s: float) -> bool:
        """True when no group is being generated or could be admitted; False after `wait_s`. A publish that drains
        waits for it."""

        def idle() -> bool:
            return not self._ledger.running() and self._ledger.admissible == 0

        await self._wait(idle, wait_s)
        return idle()

    async def counts(self) -> LedgerCounts:
        return self._ledger.counts

    # -- checkpoint ----------------------------------------------------------------------------------------------

    async def save(self, directory: Path) -> LedgerCounts:
        """Writes the ledger and the tokens of ready groups below `directory`, as of one moment between two steps."""
        snapshot = self._ledger.snapshot()
        groups = [self._stored[r.ordinal] for r in snapshot.records if r.state != "running"]
        directory.mkdir(parents=True, exist_ok=True)
        save_groups(directory, [stored.group for stored in groups])
        data = {"ledger": snapshot.to_json(), "put_versions": [stored.put_version for stored in groups]}
        (directory / "ledger.json").write_text(json.dumps(data))
        return snapshot.counts

    async def load(self, directory: Path) -> LedgerCounts:
        """Becomes what `save` wrote; groups that were running are issued again."""
        data = json.loads((directory / "ledger.json").read_text())
        self._ledger.restore(LedgerSnapshot.from_json(data["ledger"]))
        groups = load_groups(directory)
        self._stored = {
            g.ordinal: StoredGroup(g, version) for g, version in zip(groups, data["put_versions"], strict=True)
        }
        await self._notify()
        return self._ledger.counts

    async def ping(self) -> float:
        """CPU seconds of this process."""
        cpu = os.times()
        return cpu.user + cpu.system

    # -- inside --------------------------------------------------------------------------------------------------

    def _summary(self, ordinal: int, step: int) -> GroupSummary:
        stored = self._stored[ordinal]
        trajectories = stored.group.trajectories
        lag_sum = lag_max = in_flight = trained = 0
        for trajectory in trajectories:
            for segment in trajectory.segments:
                count = int(np.count_nonzero(trajectory.loss_mask[segment.start : segment.stop]))
                if segment.kind != "policy" or count == 0:
                    continue
                trained += count
                lag_sum += count * (step - segment.version)
                lag_max = max(lag_max, step - segment.version)
                in_flight += count * (stored.put_version - segment.version)
        return GroupSummary(
            ordinal=ordinal,
            attempt=stored.group.attempt,
            lengths=tuple(Lengths(len(t.prompt_ids), len(t.response_ids), t.num_trained_tokens) for t in trajectories),
            rewards=tuple(t.reward for t in trajectories),
            lag_sum=lag_sum,
            lag_max=lag_max,
            lag_in_flight_sum=in_flight,
            trained_tokens=trained,
            segments=sum(len(t.segments) for t in trajectories),
            interrupted=sum(len({s.version for s in t.segments if s.kind == "policy"}) > 1 for t in trajectories),
        )

    def _check_failures(self) -> None:
        counts, limit = self._ledger.counts, self._spec.max_failed_fraction
        if counts.ended >= MIN_ENDED_FOR_BUDGET and counts.failed > limit * counts.ended:
            raise RunFailed(
                explain(
                    f"at most {limit:.0%} of the groups may fail (rollout.max_failed_fraction)",
                    f"{counts.failed} of {counts.ended} ended groups failed",
                    f"read the tracebacks of the `failed` events in {self._spec.events_path}",
                )
            )

    def _record(self, event: GroupEvent) -> None:
        fields = asdict(event)
        self._events.write("group", transition=fields.pop("kind"), **fields)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_change(self, wait_s: float) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                pass  # the caller looks again and reports that it waited in vain

    async def _wait(self, condition: Callable[[], bool], wait_s: float) -> None:
        deadline = self._clock() + wait_s
        while not condition() and (remaining := deadline - self._clock()) > 0:
            await self._wait_change(remaining)
