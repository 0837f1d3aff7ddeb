"""The single source of truth of every prompt group. Pure: no tokens, no clock, no I/O.

    admit -> running -> ready -> leased -> trained
                |         |-> filtered            (no learning signal)
                |         `-> expired             (under mask: no token left that may be trained)
                |-> running (re-issued: retry, or its owner died)
                |-> expired                       (under refill: overdue; its prompt is admitted again)
                |-> expired                       (the limit on the lag was lowered; also from ready)
                `-> failed                        (after the retry budget)

After every transition `admitted = running + ready + leased + trained + filtered + expired + failed`. Each admission of
an ordinal counts, and ends exactly once: an ordinal may expire several times, and has at most one other end.
`queue/staleness.py` decides which groups are admitted and leased. A lease that would train a group over the lag limit
raises LedgerError, which ends the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.errors import LedgerError
from asyncrl.queue.staleness import Candidate, Selection, StalenessPolicy
from asyncrl.types import LedgerCounts, Ticket
from asyncrl.types.events import GroupChanged, Transition


class Ledger:
    """Owns the state of every prompt group, the next ordinal, the number of trained steps and the published version."""

    def __init__(
        self,
        policy: StalenessPolicy,
        *,
        max_attempts: int = 3,
        max_groups: int | None = None,
        on_event: Callable[[GroupChanged], None] = lambda event: None,
    ) -> None:
        """
        Args:
            policy: admission and lease decisions.
            max_attempts: attempts at a group before it ends `failed`; also limits how often an expired prompt is
                admitted.
            max_groups: groups that the run trains in all; no more are admitted than it still needs. None: no limit.
            on_event: called with every transition, in order.
        """
        self.policy = policy
        """The rules in force: the rules of the run, or with the lower limit of `limit_lag`."""
        self._rules_of_run = policy
        self.step = 0
        self.version = 0
        self._max_attempts = max_attempts
        self._max_groups = max_groups
        self._on_event = on_event
        self._next_ordinal = 0
        self._records: dict[int, GroupRecord] = {}
        self._totals = dict.fromkeys(("admitted", "trained", "filtered", "expired", "failed"), 0)
        self._states: dict[str, int] = {"running": 0, "ready": 0, "leased": 0}
        self._owners: dict[int, str] = {}
        """Owner of the ticket of each running group, by ordinal."""
        self._cancelled: dict[Ticket, str] = {}
        """Cancelled tickets that their owners have not answered, with the owners."""
        self._untold: dict[str, list[Ticket]] = {}
        """Cancellations that were not yet delivered, by owner."""

    # -- transitions ---------------------------------------------------------------------------------------------

    def admit(self, limit: int, most_new: float = math.inf, owner: str = "") -> list[Ticket]:
        """Issues up to `limit` tickets to `owner`: requeued groups first, of any owner, then new groups as staleness
        allows, at most `most_new`."""
        tickets: list[Ticket] = []
        # Groups with kept tokens go first: these tokens have the earlier deadline.
        waiting = sorted(self._unissued(), key=lambda r: (not r.kept, r.version if r.kept else 0, r.ordinal))
        for record in waiting[:limit]:
            version = record.version if record.kept else self.version
            issued = replace(record, issued=True, kept=False, version=version)
            self._records[record.ordinal] = issued
            self._emit("reissued", issued)
            tickets.append(issued.ticket)
        for _ in range(int(max(0, min(limit - len(tickets), self.admissible, most_new)))):
            record = GroupRecord(self._next_ordinal, attempt=0, version=self.version, state="running")
            self._next_ordinal += 1
            self._begin(record)
            tickets.append(record.ticket)
        self._owners |= dict.fromkeys((ticket.ordinal for ticket in tickets), owner)
        self._check()
        return tickets

    def put(self, ticket: Ticket, oldest_version: int | None, *, has_signal: bool = True) -> bool:
        """Makes a complete group `ready`, or ends it `filtered` when it has no learning signal. True: it is ready.

        A put of a cancelled ticket changes nothing: the rollouter may have sent it before the cancellation arrived.

        Raises LedgerError: the ticket is unknown, was put before or was re-issued, or the group claims tokens older
        than its admission.
        """
        if self._was_cancelled(ticket):
            return False
        record = self._issued(ticket, "put")
        # Replicas serve a version a moment before the ledger records it, so the upper bound is the trained steps.
        if oldest_version is not None and not ticket.version <= oldest_version <= self.step:
            raise LedgerError(
                f"group {ticket.ordinal}: oldest token has version {oldest_version}, outside "
                f"[admission {ticket.version}, trained steps {self.step}]"
            )
        done = replace(record, version=ticket.version if oldest_version is None else oldest_version)
        if has_signal:
            self._move(done, "ready")
            self._emit("ready", done)
        else:
            self._end(done, "filtered")
        return has_signal

    def nack(self, ticket: Ticket, reason: str) -> bool:
        """Requeues a group that could not be generated. False: its retry budget is spent, and it ends `failed`. A nack
        of a cancelled ticket changes nothing and returns True."""
        if self._was_cancelled(ticket):
            return True
        record = self._issued(ticket, "nack")
        failures = record.failures + 1
        if failures >= self._max_attempts:
            self._end(record, "failed", reason)
            return False
        self._requeue(replace(record, failures=failures), reason)
        return True

    def take_back(self, tickets: Iterable[Ticket], reason: str) -> int:
        """Requeues the groups of these tickets, whose owner died, without charging their retry budget.

        Returns how many groups were running."""
        taken = 0
        for ticket in tickets:
            record = self._records.get(ticket.ordinal)
            if record is not None and record.state == "running" and record.attempt == ticket.attempt and record.issued:
                self._requeue(record, reason)
                taken += 1
        return taken

    def take_back_all(self, reason: str, owner: str = "") -> int:
        """Requeues every running group of `owner`, which has died, and drops its cancellations. Returns the number of
        groups."""
        self._untold.pop(owner, None)
        self._cancelled = {ticket: whose for ticket, whose in self._cancelled.items() if whose != owner}
        return self.take_back([r.ticket for r in self.running() if self._owners.get(r.ordinal) == owner], reason)

    def take_cancelled(self, owner: str = "") -> tuple[Ticket, ...]:
        """The tickets of `owner` whose groups expired while they were being generated; each is returned once."""
        return tuple(self._untold.pop(owner, ()))

    def lease(self, step: int, oldest_trained: Callable[[int, int], int | None] | None = None) -> Selection:
        """Leases the groups of `step`; if the step must wait, the selection says for how many groups. Idempotent until
        commit or rollback.

        Args:
            oldest_trained: used under mask, for groups with tokens over the limit. (ordinal, version) -> version of the
                group's oldest trained token not older than `version`; None: there is no such token, and the group
                expires.

        Raises LedgerError: a group would be trained over the limit.
        """
        self._at(step, "lease")
        if leased := self._in("leased"):
            return Selection(tuple(r.ordinal for r in sorted(leased, key=lambda r: (r.version, r.ordinal))))
        selection = self._select(step)
        while selection.expire or self._mask(selection, step, oldest_trained):
            for ordinal in selection.expire:
                self._give_up(self._records[ordinal])
            selection = self._select(step)
        for ordinal in selection.chosen:
            record = self._records[ordinal]
            lag = step - record.version
            if lag > self.policy.max_lag:
                raise LedgerError(f"group {ordinal} would be trained with lag {lag} > {self.policy.max_lag}")
            self._move(record, "leased")
            self._emit("leased", record)
        return selection

    def foresee(self, step: int) -> tuple[int, ...]:
        """The groups that a lease of `step`, the step after the current one, would choose now. Changes nothing."""
        return self._select(step).chosen

    def commit(self, step: int) -> tuple[int, ...]:
        """Ends the leased groups as `trained` and completes the step; returns their ordinals."""
        self._at(step, "commit")
        if not (leased := self._in("leased")):
            raise LedgerError(f"commit({step}): nothing is leased")
        for record in leased:
            self._end(record, "trained")
        self.step += 1
        self._check()
        return tuple(r.ordinal for r in leased)

    def rollback(self, step: int) -> None:
        """Makes the leased groups ready again, without training them in `step`."""
        self._at(step, "rollback")
        for record in self._in("leased"):
            self._move(record, "ready")
            self._emit("released", record)

    def published(self, version: int) -> None:
        """Records that the replicas serve `version`, which frees the slots of the steps before it."""
        if not self.version <= version <= self.step:
            raise LedgerError(f"published({version}): published {self.version}, trained {self.step} steps")
        self.version = version

    def limit_lag(self, limit: int) -> int:
        """Sets the limit on the lag, at most the limit of the run; returns how many groups expired.

        A lower limit expires, for good, the fewest groups such that the rest can be trained within it. A higher limit
        expires none. Nothing may be leased.

        Raises LedgerError: groups are leased. ValueError: the limit is negative or above the limit of the run.
        """
        if self._states["leased"]:
            raise LedgerError(f"limit_lag({limit}): the {self._states['leased']} groups of a step are leased")
        self.policy = self._rules_of_run.limited(limit)
        surplus = self.policy.surplus([self._candidate(r) for r in self._records.values()], self.step)
        for ordinal in surplus:
            self._cancel(self._records[ordinal], f"over the lowered limit {limit} on the lag")
        return len(surplus)

    # -- views ---------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> LedgerCounts:
        return LedgerCounts(**self._totals, **self._states)

    @property
    def admissible(self) -> int:
        """New groups that may be admitted now."""
        active = len(self._records)
        room = self.policy.admissible(step=self.step, version=self.version, active=active)
        if self._max_groups is not None:
            room = min(room, self._max_groups - self._totals["trained"] - active)
        return max(0, room)

    def has_pending(self, owner: str = "") -> bool:
        """True if an admission of `owner` would return a requeued group or a cancellation."""
        return owner in self._untold or next(self._unissued(), None) is not None

    def held(self) -> Counter[str]:
        """Running groups by the owner of their ticket."""
        return Counter(self._owners.values())

    def record(self, ordinal: int) -> GroupRecord | None:
        return self._records.get(ordinal)

    def running(self) -> list[GroupRecord]:
        return self._in("running")

    def snapshot(self) -> LedgerSnapshot:
        records = tuple(sorted(self._records.values(), key=lambda r: r.ordinal))
        return LedgerSnapshot(self.step, self.version, self._next_ordinal, self.counts, records)

    def restore(self, snapshot: LedgerSnapshot, kept: Collection[int] = ()) -> None:
        """Replaces all state with `snapshot`, and resets the limit on the lag to the limit of the run. Running groups
        are requeued as the next attempt and leased groups are ready again: their owners are gone.

        Args:
            kept: ordinals of running groups whose tokens were kept. A kept group keeps its version when it is issued
                again; the others get the version published by then.

        A snapshot taken under mask may hold groups that another policy cannot train in time; they end `expired`.
        """
        self.policy = self._rules_of_run
        self.step, self.version, self._next_ordinal = snapshot.step, snapshot.version, snapshot.next_ordinal
        counts = snapshot.counts
        self._totals = {name: getattr(counts, name) for name in self._totals}
        self._records = {r.ordinal: r for r in snapshot.records}
        self._states = {name: sum(r.state == name for r in snapshot.records) for name in self._states}
        self._owners.clear()
        self._cancelled.clear()
        self._untold.clear()
        self.rollback(self.step)
        for record in self.running():
            self._requeue(record, "restored from a checkpoint", kept=record.ordinal in kept)
        for ordinal in self.policy.surplus([self._candidate(r) for r in self._records.values()], self.step):
            self._end(self._records[ordinal], "expired", f"too old for on_overdue={self.policy.on_overdue}")
        self._check()

    # -- inside --------------------------------------------------------------------------------------------------

    def _candidate(self, record: GroupRecord) -> Candidate:
        # A requeued group without tokens gets the version that is published when it is issued.
        anew = record.state == "running" and not record.issued and not record.kept
        return Candidate(record.ordinal, self.policy.deadline(self.version if anew else record.version))

    def _was_cancelled(self, ticket: Ticket) -> bool:
        """True once per cancelled ticket: the first answer to it settles the cancellation."""
        if ticket not in self._cancelled:
            return False
        untold = self._untold.pop(owner := self._cancelled.pop(ticket), [])
        if left := [t for t in untold if t != ticket]:
            self._untold[owner] = left
        return True

    def _in(self, state: State) -> list[GroupRecord]:
        return [r for r in self._records.values() if r.state == state]

    def _unissued(self) -> Iterator[GroupRecord]:
        return (r for r in self._records.values() if r.state == "running" and not r.issued)

    def _select(self, step: int) -> Selection:
        return self.policy.select(
            step=step,
            version=self.version,
            ready=[self._candidate(r) for r in self._in("ready")],
            unready=[self._candidate(r) for r in self._in("running")],
        )

    def _mask(self, selection: Selection, step: int, oldest_trained: Callable[[int, int], int | None] | None) -> bool:
        """Under mask, sets the version of late chosen groups to the version of their oldest token within the limit.
        True: a group without such a token has expired, so the selection must be repeated."""
        if self.policy.on_overdue != "mask":
            return False
        oldest = self.policy.oldest_trainable(step)
        late = [r for o in selection.chosen if (r := self._records[o]).version < oldest]
        versions = [(r, oldest_trained(r.ordinal, oldest) if oldest_trained else oldest) for r in late]
        spent = [record for record, version in versions if version is None]
        for record in spent:
            self._end(record, "expired", f"every token is over the limit in step {step}")
        if not spent:
            self._records |= {r.ordinal: replace(r, version=version) for r, version in versions if version is not None}
        return bool(spent)

    def _give_up(self, record: GroupRecord) -> None:
        """Ends an overdue running group; its prompt is admitted again while it has attempts left."""
        again = record.attempt + 1 < self._max_attempts
        then = f"admitted again as attempt {record.attempt + 1}" if again else "for good"
        self._cancel(record, f"overdue, deadline {self.policy.deadline(record.version)}: {then}")
        if again:
            fresh = replace(record, attempt=record.attempt + 1, version=self.version, issued=False, kept=False)
            self._begin(fresh)

    def _cancel(self, record: GroupRecord, why: str) -> None:
        """Ends a running or ready group as `expired`; the rollouter that holds its ticket is told."""
        owner = self._owners.get(record.ordinal, "")
        self._end(record, "expired", why)
        if record.state == "running" and record.issued:
            self._cancelled[record.ticket] = owner
            self._untold.setdefault(owner, []).append(record.ticket)

    def _begin(self, record: GroupRecord) -> None:
        self._records[record.ordinal] = record
        self._totals["admitted"] += 1
        self._states["running"] += 1
        self._emit("admitted", record)

    def _issued(self, ticket: Ticket, call: str) -> GroupRecord:
        record = self._records.get(ticket.ordinal)
        if record is None or record.state != "running" or record.attempt != ticket.attempt or not record.issued:
            found = "it has ended or was never admitted" if record is None else f"it is {record}"
            raise LedgerError(f"{call} of group {ticket.ordinal} attempt {ticket.attempt} refused: {found}")
        return record

    def _at(self, step: int, call: str) -> None:
        if step != self.step:
            raise LedgerError(f"{call}({step}): the step to be trained next is {self.step}")

    def _requeue(self, record: GroupRecord, reason: str, *, kept: bool = False) -> None:
        # Not above the published version: a group's version is a lower bound of its tokens' versions.
        version = min(record.version, self.version)
        again = replace(record, attempt=record.attempt + 1, issued=False, kept=kept, version=version)
        self._records[record.ordinal] = again
        self._owners.pop(record.ordinal, None)
        self._emit("requeued", again, reason)

    def _move(self, record: GroupRecord, state: State) -> None:
        before = self._records[record.ordinal].state
        self._states[before] -= 1
        self._states[state] += 1
        self._owners.pop(record.ordinal, None)
        self._records[record.ordinal] = replace(record, state=state)
        self._check()

    def _end(self, record: GroupRecord, end: End, detail: str = "") -> None:
        before = self._records.pop(record.ordinal).state
        self._owners.pop(record.ordinal, None)
        self._states[before] -= 1
        self._totals[end] += 1
        self._emit(end, record, detail)
        self._check()

    def _emit(self, transition: Transition, record: GroupRecord, detail: str = "") -> None:
        group = record.ordinal, record.attempt
        self._on_event(GroupChanged(transition, *group, self.step, self.version, record.version, detail))

    def _check(self) -> None:
        counts = self.counts
        if counts.admitted != counts.active + counts.ended or counts.active != len(self._records):
            raise LedgerError(f"the ledger does not balance: {counts}, {len(self._records)} records")


# The ledger's records of groups, as plain values.


State = Literal["running", "ready", "leased"]
End = Literal["trained", "filtered", "expired", "failed"]


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """An unfinished group.

    `version`: of its oldest token; of its admission while it has no token; of its oldest trained token once leased.
    `failures` counts against the retry budget. `issued`: False while a running group waits for a ticket. `kept`: tokens
    from a checkpoint, none older than `version`, wait with it.
    """

    ordinal: int
    attempt: int
    version: int
    state: State
    issued: bool = True
    failures: int = 0
    kept: bool = False

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.ordinal, self.attempt, self.version)


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The whole state of a ledger."""

    step: int
    version: int
    next_ordinal: int
    counts: LedgerCounts
    records: tuple[GroupRecord, ...]
