"""The message queue: a thin asyncio shell around the ledger, which also holds the tokens of ready and leased groups.

Runs as a Ray actor. Callers wait in bounded long polls, which return without a result after `wait_s`. The queue writes
every transition of a group to `events.jsonl`, in order.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.config.hidden import Hidden
from asyncrl.config.recipe import Recipe
from asyncrl.errors import ConfigError, LedgerError, RunFailed, explain
from asyncrl.observability.events import EventLog, new_writer
from asyncrl.queue.budgets import EndBudgets
from asyncrl.queue.ledger import GroupRecord, Ledger
from asyncrl.queue.masking import StoredGroup, mask_older, oldest_trained, summarize
from asyncrl.queue.pacing import build_pacing, shortfall
from asyncrl.queue.saved_state import SavedState, load_state, save_state
from asyncrl.queue.staleness import Selection, StalenessPolicy
from asyncrl.remote.connection import HasConnections
from asyncrl.remote.tasks import wait_event
from asyncrl.types import (
    Admission,
    Committed,
    GroupSummary,
    LeaseManifest,
    LeaseWait,
    LedgerCounts,
    PartialGroup,
    Ticket,
    Trajectory,
    TrajectoryGroup,
    TrajectoryKey,
)
from asyncrl.types.events import GroupChanged, SnapshotRestored, SnapshotTaken


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """Arguments of a message queue. `writer`: of this queue's events."""

    recipe: Recipe
    events_path: Path
    hide: Hidden = field(default_factory=Hidden)
    writer: str = field(default_factory=new_writer)


class MessageQueue(HasConnections):
    """Owns the ledger, the tokens of ready and leased groups, the partial trajectories that a resume restored, and the
    event log."""

    def __init__(self, spec: QueueSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recipe = recipe = spec.recipe
        self._clock = clock
        self._events = EventLog(spec.events_path, spec.hide, writer=spec.writer)
        self._budgets = EndBudgets(
            max_failed=recipe.rollout.max_failed_fraction,
            failed_window=recipe.rollout.failed_window,
            max_filtered=recipe.algorithm.max_filtered_fraction if recipe.algorithm.dynamic_sampling else 1.0,
            filtered_window=recipe.algorithm.filtered_window,
            events_path=spec.events_path,
        )
        self._ledger = Ledger(
            StalenessPolicy(recipe.batch.groups_per_step, recipe.max_lag, recipe.staleness.on_overdue),
            max_attempts=recipe.rollout.max_attempts,
            max_groups=recipe.run.max_steps * recipe.batch.groups_per_step,
            on_event=self._record,
        )
        self._pacing = build_pacing(recipe)
        self._stored: dict[int, StoredGroup] = {}
        self._leased: dict[int, TrajectoryGroup] = {}
        """The groups of the lease, as the step trains them."""
        self._foreseen: dict[int, TrajectoryGroup] = {}
        """The groups of the last `foresee`, as that step would train them."""
        self._described: dict[int, tuple[TrajectoryGroup, GroupSummary]] = {}
        """The groups of the step that was described last, as it trains them, with their summaries."""
        self._described_step = -1
        self._partials: dict[int, PartialGroup] = {}
        """Restored partial groups that wait to be issued again, each with its future ticket."""
        self._captured: SavedState | None = None
        self._asking: set[str] = set()
        """Rollouters that wait for an admission."""
        self._gone: set[str] = set()
        """Rollouters whose tickets were taken back."""
        self._changed = asyncio.Event()
        self._overdue_since: float | None = None

    # -- rollout side --------------------------------------------------------------------------------------------

    async def admit(self, limit: int, wait_s: float, client_id: str = "") -> Admission:
        """Up to `limit` tickets, and the tickets to cancel; waits at most `wait_s` for the first of either.

        The rollouters that ask get shares such that all hold the same number of running groups. A client whose tickets
        were taken back counts as dead and gets an empty admission.
        """
        ledger = self._ledger

        def has_some() -> bool:
            return client_id in self._gone or ledger.has_pending(client_id) or self._share(client_id) >= 1

        self._asking.add(client_id)
        try:
            await self._wait(has_some, wait_s, wakes_at=lambda: self._pacing.next_change(self._clock()))
            if client_id in self._gone:
                return Admission()  # replaced during the wait: its tickets would be lost
            tickets = ledger.admit(limit, self._share(client_id), client_id)
        finally:
            self._asking.discard(client_id)
        for ticket in tickets:
            self._pacing.begun(ticket.ordinal, self._clock())
        # Wakes the other rollouters, which share the room that is left.
        if self._asking and self._room() >= 1:
            self._notify()
        found = [(t, self._partials.pop(t.ordinal, None)) for t in tickets]
        partials = tuple(p for t, p in found if p is not None and p.ticket == t)
        return Admission(tuple(tickets), ledger.take_cancelled(client_id), partials)

    async def put(self, ticket: Ticket, group: TrajectoryGroup) -> None:
        """Stores the group for its ticket.

        A group with tokens of a version that no trained step has made counts as a failed attempt: a server or an
        environment reports it wrongly.

        Raises LedgerError: the ticket is not running. ValueError: the group is malformed.
        """
        group.validate()
        if (group.ordinal, group.attempt) != (ticket.ordinal, ticket.attempt):
            raise LedgerError(f"put of group {group.ordinal}.{group.attempt} with the ticket of {ticket}")
        newest = max((s.version for t in group.sequences for s in t.segments), default=0)
        if newest > self._ledger.step:
            found = f"{self._ledger.step} steps are trained, so that no such version exists"
            do = "let the server or the environment report the version that sampled each token"
            await self.nack(ticket, explain(f"tokens sampled by version {newest}", found, do))
            return
        rewards = [t.reward for t in group.trajectories]
        has_signal = not self._recipe.algorithm.dynamic_sampling or min(rewards) != max(rewards)
        if self._ledger.put(ticket, group.oldest_version, has_signal=has_signal):
            self._stored[group.ordinal] = StoredGroup(group, max(self._ledger.version, newest))
            self._pacing.ready(ticket.ordinal, self._clock())
        self._notify()

    async def put_many(self, items: list[tuple[Ticket, TrajectoryGroup]]) -> list[Exception | None]:
        """`put` for each; returns the error of each put or None, in order."""
        outcomes: list[Exception | None] = []
        for ticket, group in items:
            try:
                await self.put(ticket, group)
                outcomes.append(None)
            except Exception as e:  # noqa: BLE001 - task boundary: only the caller of this put gets the error
                outcomes.append(e)
        return outcomes

    async def nack(self, ticket: Ticket, reason: str) -> bool:
        """Reports that a group could not be generated; `reason` has the traceback. False: it has ended `failed`."""
        again = self._ledger.nack(ticket, reason)
        self._notify()
        return again

    async def take_back_all(self, reason: str, client_id: str) -> int:
        """Requeues all groups of the rollouter `client_id`, which has died; returns how many."""
        self._gone.add(client_id)
        count = self._ledger.take_back_all(reason, client_id)
        self._notify()
        return count

    # -- training side -------------------------------------------------------------------------------------------

    async def lease(self, step: int, wait_s: float) -> LeaseManifest | LeaseWait:
        """The groups that `step` trains; after `wait_s` without them, the reason for the wait.

        Raises RunFailed when more groups failed, or were filtered, than the budget allows.
        """
        deadline = self._clock() + wait_s
        self._pacing.asked(self._clock())
        self._notify()  # pacing never refuses the groups of a waiting step
        while True:
            selection = self._select(step)
            if selection.chosen:
                return self._manifest(step, selection.chosen)
            if selection.missing == 0 and self._overdue_since is None:
                self._overdue_since = self._clock()
            remaining = deadline - self._clock()
            if remaining <= 0:
                return LeaseWait(selection.missing, selection.overdue, self._ledger.counts)
            await wait_event(self._changed, remaining)

    async def foresee(self, step: int, wait_s: float) -> tuple[GroupSummary, ...]:
        """The groups that `step`, the step after the current one, would lease now, as its lease would describe them.
        Empty if the lease would still have to wait after `wait_s`, or the current step has ended. Decides nothing."""

        def is_next() -> bool:
            return step == self._ledger.step + 1

        await self._wait(lambda: not is_next() or bool(self._ledger.foresee(step)), wait_s)
        if not is_next():
            return ()
        self._foreseen = self._as_trained(step, self._ledger.foresee(step))
        return self._summaries(step, self._foreseen)

    async def fetch_ahead(self, keys: list[TrajectoryKey]) -> dict[TrajectoryKey, Trajectory]:
        """The sequences among `keys` that were foreseen last."""
        groups = {ordinal: self._foreseen[ordinal].sequences for ordinal, _ in keys if ordinal in self._foreseen}
        return {(o, index): _alone(groups[o][index]) for o, index in keys if o in groups}

    async def fetch(self, keys: list[TrajectoryKey]) -> list[Trajectory]:
        """Sequences of leased groups, without branches; tokens over the limit are masked out of the loss. Raises
        LedgerError naming an ordinal that is not leased."""
        groups: dict[int, tuple[Trajectory, ...]] = {}
        for ordinal in {ordinal for ordinal, _ in keys}:
            if ordinal not in self._leased:
                raise LedgerError(f"fetch of group {ordinal} refused: it is {self._ledger.record(ordinal)}")
            groups[ordinal] = self._leased[ordinal].sequences
        return [_alone(groups[ordinal][index]) for ordinal, index in keys]

    async def some_ready(self, count: int) -> list[Trajectory]:
        """The first sequence of up to `count` stored groups, without branches."""
        return [_alone(stored.group.sequences[0]) for stored in itertools.islice(self._stored.values(), count)]

    async def commit(self, step: int, *, leases_next: bool = False) -> Committed:
        """Ends the leased groups as trained. `leases_next`: also leases the groups of the next step if they are ready,
        which saves the trainer a call."""
        self._ledger.commit(step)
        self._leased = {}
        if self._described_step <= step:
            self._described = {}
        counts, shares = self._ledger.counts, self._budgets.shares
        lease = self._lease_now(step + 1) if leases_next else None
        self._notify()
        return Committed(counts, shares, lease)

    async def published(self, version: int) -> LedgerCounts:
        self._ledger.published(version)
        self._notify()
        return self._ledger.counts

    async def limit_lag(self, limit: int) -> LedgerCounts:
        """Sets the limit on the lag from the next lease on, at most `max_lag`; see `Ledger.limit_lag`."""
        self._ledger.limit_lag(limit)
        self._notify()  # a lower limit cancels tickets, a higher one admits groups
        return self._ledger.counts

    async def wait_idle(self, wait_s: float) -> bool:
        """True when no group is running and none can be admitted; False after `wait_s`. Used by the drain before a
        publish. Raises RunFailed as `lease` does."""

        def idle() -> bool:
            return not self._ledger.running() and self._ledger.admissible == 0

        await self._wait(idle, wait_s)
        self._budgets.check()
        return idle()

    async def counts(self) -> LedgerCounts:
        return self._ledger.counts

    # -- checkpoint ----------------------------------------------------------------------------------------------

    async def capture(self, partials: list[PartialGroup]) -> LedgerCounts:
        """Keeps the current state of the queue, between two steps, for `save`, with the `partials` whose groups still
        run under the same ticket. Fast: copies no tokens."""
        ledger = self._ledger.snapshot()
        snapshot = f"{ledger.step}-{secrets.token_hex(4)}"
        running = {r.ordinal: r for r in ledger.records if r.state == "running"}
        kept = [
            p
            for p in (*partials, *self._partials.values())
            if (record := running.get(p.ticket.ordinal)) is not None and _continues(p, record, ledger.step)
        ]
        self._events.write(SnapshotTaken(snapshot, ledger.step, ledger.counts))
        self._captured = SavedState(
            snapshot=snapshot,
            chain=self._events.chain,
            ledger=ledger,
            groups=tuple(self._stored[r.ordinal] for r in ledger.records if r.state != "running"),
            partials=tuple(kept),
            failed_window=self._budgets.failed.to_text(),
            filtered_window=self._budgets.filtered.to_text(),
        )
        return ledger.counts

    async def save(self, directory: Path) -> None:
        """Writes the last capture below `directory` while the queue continues to serve; before that, flushes the events
        to disk. Raises LedgerError: nothing was captured since the last save."""
        captured, self._captured = self._captured, None
        if captured is None:
            raise LedgerError(f"save to {directory}: capture comes first")
        await asyncio.to_thread(self._events.sync)
        await asyncio.to_thread(save_state, directory, captured)

    async def load(self, directory: Path) -> LedgerCounts:
        """Restores a capture; groups that were running are requeued with their partial trajectories.

        Raises ConfigError: the files below `directory` cannot be restored."""
        saved = await asyncio.to_thread(load_state, directory)
        self._events.write(SnapshotRestored(saved.snapshot, saved.ledger.step, saved.ledger.counts))
        # Everything that belongs to the undone steps is dropped; the captured windows and records replace it.
        self._stored = {stored.group.ordinal: stored for stored in saved.groups}
        self._leased, self._foreseen, self._described = {}, {}, {}
        self._pacing = build_pacing(self._recipe)
        self._overdue_since = None
        self._budgets.failed.load_text(saved.failed_window)
        self._budgets.filtered.load_text(saved.filtered_window)
        partials = {p.ticket.ordinal: p for p in saved.partials}
        try:
            self._ledger.restore(saved.ledger, kept=partials)
        except LedgerError as error:
            do = "name another checkpoint, or its run directory for the newest intact one"
            raise ConfigError(explain(f"the ledger of {directory.parent}", str(error), do)) from error
        # A requeued group has a new ticket, which its partial trajectories must carry to be handed out with it.
        self._partials = {
            ordinal: replace(partial, ticket=record.ticket)
            for ordinal, partial in partials.items()
            if (record := self._ledger.record(ordinal)) is not None and record.kept
        }
        self._notify()
        return self._ledger.counts

    async def ping(self) -> float:
        """CPU seconds of this process."""
        return time.process_time()

    # -- inside --------------------------------------------------------------------------------------------------

    def _lease_now(self, step: int) -> LeaseManifest | None:
        """None: the groups are not ready, or the run must end; then `lease` raises, after the commit was recorded."""
        self._pacing.asked(self._clock())
        try:
            selection = self._select(step)
        except RunFailed:
            return None
        return self._manifest(step, selection.chosen) if selection.chosen else None

    def _select(self, step: int) -> Selection:
        self._budgets.check()
        expired, began = self._ledger.counts.expired, self._clock()  # the selection itself is not waiting for groups
        selection = self._ledger.lease(step, lambda o, version: oldest_trained(self._stored[o].group, version))
        if selection.chosen:
            self._pacing.leased(selection.chosen, began)
        if selection.chosen or self._ledger.counts.expired > expired:
            self._notify()  # a slot may be free, a ticket cancelled, or pacing may want more groups
        return selection

    def _manifest(self, step: int, ordinals: tuple[int, ...]) -> LeaseManifest:
        waited = 0.0 if self._overdue_since is None else self._clock() - self._overdue_since
        self._overdue_since = None
        self._leased = self._as_trained(step, ordinals)
        return LeaseManifest(step, self._summaries(step, self._leased), waited)

    def _as_trained(self, step: int, ordinals: tuple[int, ...]) -> dict[int, TrajectoryGroup]:
        """The groups, with tokens over the limit in `step` masked."""
        policy = self._ledger.policy
        groups = {o: self._stored[o].group for o in ordinals}
        if policy.on_overdue != "mask":
            return groups
        return {o: mask_older(group, policy.oldest_trainable(step)) for o, group in groups.items()}

    def _summaries(self, step: int, groups: dict[int, TrajectoryGroup]) -> tuple[GroupSummary, ...]:
        """Reuses the summaries of foreseen groups, so that the trainer does not wait for them."""
        limit, known = self._ledger.policy.max_lag, self._described if step == self._described_step else {}
        self._described, self._described_step = {}, step
        for ordinal, group in groups.items():
            before, summary = known.get(ordinal, (None, None))
            if summary is None or before is not group or summary.lag_max > limit:
                summary = summarize(self._stored[ordinal], group, step=step, max_lag=limit)
            self._described[ordinal] = group, summary
        return tuple(summary for _, summary in self._described.values())

    def _record(self, event: GroupChanged) -> None:
        self._events.write(event)
        if event.transition in ("requeued", "filtered", "expired", "failed"):
            self._pacing.gone(event.ordinal)
        if event.transition in ("trained", "filtered", "expired", "failed"):
            self._budgets.add(event.transition)
            self._stored.pop(event.ordinal, None)
            self._partials.pop(event.ordinal, None)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(
        self, condition: Callable[[], bool], wait_s: float, *, wakes_at: Callable[[], float | None] = lambda: None
    ) -> None:
        """`wakes_at`: when the condition may become true without a notification."""
        deadline = self._clock() + wait_s
        while not condition() and (remaining := deadline - self._clock()) > 0:
            at = wakes_at()
            await wait_event(self._changed, remaining if at is None else min(remaining, max(0.001, at - self._clock())))

    def _room(self) -> float:
        """New groups that staleness admits and the pacing wants now."""
        wanted = shortfall(self._pacing, self._clock(), self._ledger.counts, self._budgets.shares.filtered)
        return min(self._ledger.admissible, wanted)

    def _share(self, client_id: str) -> int:
        """New groups for this rollouter, such that all rollouters that ask now hold equally many."""
        if (room := self._room()) < 1:
            return 0
        held = self._ledger.held()
        together = sum(held[asking] for asking in self._asking) + int(room)
        return min(int(room), math.ceil(together / len(self._asking)) - held[client_id])


def _continues(partial: PartialGroup, record: GroupRecord, step: int) -> bool:
    """True if `partial` belongs to this running group, and the group may have its tokens' versions."""
    if partial.ticket != record.ticket or not (record.issued or record.kept):
        return False
    segments = [
        s
        for t in partial.trajectories
        for holder in (t.done.sequences if t.done else t.calls)
        for s in holder.segments
        if s.kind == "policy"
    ]
    return bool(segments) and all(record.version <= s.version <= step for s in segments)


def _alone(sequence: Trajectory) -> Trajectory:
    """Without branches, which are separate sequences."""
    return replace(sequence, branches=()) if sequence.branches else sequence
