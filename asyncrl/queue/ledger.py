"""The single source of truth of every prompt group. Pure: no tokens, no clock, no I/O.

    admit -> running -> ready -> leased -> trained
                |         `-> filtered            (no learning signal)
                |-> running (re-issued: retry, or its owner died)
                `-> failed                        (after the retry budget)

`expired` is the end of a group that a policy gives up because it is overdue. After every transition
`admitted = running + ready + leased + trained + filtered + expired + failed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from asyncrl.errors import LedgerError
from asyncrl.queue.staleness import Candidate, Selection, StalenessPolicy
from asyncrl.types import Ticket

State = Literal["running", "ready", "leased"]
End = Literal["trained", "filtered", "expired", "failed"]
EventKind = Literal["admitted", "reissued", "ready", "leased", "returned", "trained", "filtered", "expired", "failed"]


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """One transition of one group; `step` and `version` are those of the ledger when it happened."""

    kind: EventKind
    ordinal: int
    attempt: int
    step: int
    version: int
    oldest_version: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """An unfinished group. `version`: of its oldest token, or of its admission. `failures` count against the budget.

    `issued` is False while a running group waits to be handed out (again).
    """

    ordinal: int
    attempt: int
    version: int
    state: State
    issued: bool = True
    failures: int = 0


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Groups: `admitted` and the four ends are cumulative, the three states are current."""

    admitted: int = 0
    running: int = 0
    ready: int = 0
    leased: int = 0
    trained: int = 0
    filtered: int = 0
    expired: int = 0
    failed: int = 0

    @property
    def active(self) -> int:
        return self.running + self.ready + self.leased

    @property
    def ended(self) -> int:
        return self.trained + self.filtered + self.expired + self.failed


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """All that a ledger is, as plain values (`to_json` / `from_json`)."""

    step: int
    version: int
    next_ordinal: int
    counts: LedgerCounts
    records: tuple[GroupRecord, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LedgerSnapshot:
        return cls(
            step=data["step"],
            version=data["version"],
            next_ordinal=data["next_ordinal"],
            counts=LedgerCounts(**data["counts"]),
            records=tuple(GroupRecord(**record) for record in data["records"]),
        )


class Ledger:
    """Args:
    policy: admission and lease decisions.
    max_attempts: times a group is tried before it ends `failed`.
    max_groups: groups the run trains in all; no more are admitted than are needed to reach it (None: no limit).
    on_event: called with every transition, in order.
    """

    def __init__(
        self,
        policy: StalenessPolicy,
        *,
        max_attempts: int = 3,
        max_groups: int | None = None,
        on_event: Callable[[GroupEvent], None] = lambda event: None,
    ) -> None:
        self.policy = policy
        self.step = 0
        self.version = 0
        self._max_attempts = max_attempts
        self._max_groups = max_groups
        self._on_event = on_event
        self._next_ordinal = 0
        self._records: dict[int, GroupRecord] = {}
        self._totals = dict.fromkeys(("admitted", "trained", "filtered", "expired", "failed"), 0)
        self._states: dict[str, int] = {"running": 0, "ready": 0, "leased": 0}

    # -- transitions ---------------------------------------------------------------------------------------------

    def admit(self, limit: int) -> list[Ticket]:
        """Up to `limit` tickets: groups to be re-issued first, then as many new ones as staleness allows."""
        tickets: list[Ticket] = []
        for record in [r for r in self._records.values() if r.state == "running" and not r.issued][:limit]:
            issued = replace(record, issued=True, version=self.version)
            self._records[record.ordinal] = issued
            self._emit("reissued", issued)
            tickets.append(Ticket(issued.ordinal, issued.attempt, issued.version))
        for _ in range(min(limit - len(tickets), self.admissible)):
            record = GroupRecord(self._next_ordinal, attempt=0, version=self.version, state="running")
            self._next_ordinal += 1
            self._records[record.ordinal] = record
            self._totals["admitted"] += 1
            self._states["running"] += 1
            self._emit("admitted", record)
            tickets.append(Ticket(record.ordinal, record.attempt, record.version))
        self._check()
        return tickets

    def put(self, ticket: Ticket, oldest_version: int | None, *, has_signal: bool = True) -> None:
        """The group is complete: `ready`, or `filtered` when it has no learning signal.

        Raises LedgerError: the ticket is unknown, was put before, was re-issued, or the group claims tokens older
        than its admission.
        """
        record = self._issued(ticket, "put")
        # The replicas serve a version a moment before the ledger hears of it, so the upper bound is the trained steps.
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

    def nack(self, ticket: Ticket, reason: str) -> bool:
        """The group could not be generated. True: it will be re-issued; False: its budget is spent, it is `failed`."""
        record = self._issued(ticket, "nack")
        failures = record.failures + 1
        if failures >= self._max_attempts:
            self._end(record, "failed", reason)
            return False
        self._reissue(replace(record, failures=failures), reason)
        return True

    def take_back(self, tickets: Iterable[Ticket], reason: str) -> None:
        """The owner of these tickets is gone: they are issued again without touching their retry budget."""
        for ticket in tickets:
            record = self._records.get(ticket.ordinal)
            if record is not None and record.state == "running" and record.attempt == ticket.attempt and record.issued:
                self._reissue(record, reason)

    def lease(self, step: int) -> Selection:
        """Leases the groups of `step`, or says what it waits for. Idempotent until commit or rollback."""
        self._at(step, "lease")
        leased = [r for r in self._records.values() if r.state == "leased"]
        if leased:
            return Selection(tuple(r.ordinal for r in sorted(leased, key=lambda r: (r.version, r.ordinal))))
        ready = [self._candidate(r) for r in self._records.values() if r.state == "ready"]
        unready = [self._candidate(r) for r in self._records.values() if r.state == "running"]
        selection = self.policy.select(step=step, ready=ready, unready=unready)
        for ordinal in selection.chosen:
            record = self._records[ordinal]
            lag = step - record.version
            if lag > self.policy.max_lag:
                raise LedgerError(f"group {ordinal} would be trained with lag {lag} > {self.policy.max_lag}")
            self._move(record, "leased")
            self._emit("leased", record)
        return selection

    def commit(self, step: int) -> tuple[int, ...]:
        """Step `step` has trained its lease; returns the ordinals that ended `trained`."""
        self._at(step, "commit")
        leased = [r for r in self._records.values() if r.state == "leased"]
        if not leased:
            raise LedgerError(f"commit({step}): nothing is leased")
        for record in leased:
            self._end(record, "trained")
        self.step += 1
        self._check()
        return tuple(r.ordinal for r in leased)

    def rollback(self, step: int) -> None:
        """Step `step` will not be trained with its lease: the groups are ready again."""
        self._at(step, "rollback")
        for record in [r for r in self._records.values() if r.state == "leased"]:
            self._move(record, "ready")
            self._emit("returned", record)

    def published(self, version: int) -> None:
        """The replicas now serve `version`; slots of the steps it contains are free."""
        if not self.version <= version <= self.step:
            raise LedgerError(f"published({version}): published {self.version}, trained {self.step} steps")
        self.version = version

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

    @property
    def has_pending(self) -> bool:
        """A running group waits to be re-issued."""
        return any(r.state == "running" and not r.issued for r in self._records.values())

    def record(self, ordinal: int) -> GroupRecord | None:
        return self._records.get(ordinal)

    def running(self) -> list[GroupRecord]:
        return [r for r in self._records.values() if r.state == "running"]

    def snapshot(self) -> LedgerSnapshot:
        records = tuple(sorted(self._records.values(), key=lambda r: r.ordinal))
        return LedgerSnapshot(self.step, self.version, self._next_ordinal, self.counts, records)

    def restore(self, snapshot: LedgerSnapshot) -> None:
        """Becomes `snapshot`. Running and leased groups have lost their owners: the former are re-issued as a new
        attempt, the latter are ready again."""
        self.step, self.version, self._next_ordinal = snapshot.step, snapshot.version, snapshot.next_ordinal
        counts = snapshot.counts
        self._totals = {name: getattr(counts, name) for name in self._totals}
        self._records = {r.ordinal: r for r in snapshot.records}
        self._states = {name: sum(r.state == name for r in snapshot.records) for name in self._states}
        self.rollback(self.step)
        for record in self.running():
            self._reissue(record, "restored from a checkpoint")
        self._check()

    # -- inside --------------------------------------------------------------------------------------------------

    def _candidate(self, record: GroupRecord) -> Candidate:
        # A group that waits to be re-issued has no token yet: it will be admitted at the version published then.
        version = record.version if record.issued or record.state != "running" else self.version
        return Candidate(record.ordinal, self.policy.deadline(version))

    def _issued(self, ticket: Ticket, call: str) -> GroupRecord:
        record = self._records.get(ticket.ordinal)
        if record is None or record.state != "running" or record.attempt != ticket.attempt or not record.issued:
            found = "it has ended or was never admitted" if record is None else f"it is {record}"
            raise LedgerError(f"{call} of group {ticket.ordinal} attempt {ticket.attempt} refused: {found}")
        return record

    def _at(self, step: int, call: str) -> None:
        if step != self.step:
            raise LedgerError(f"{call}({step}): the step to be trained next is {self.step}")

    def _reissue(self, record: GroupRecord, reason: str) -> None:
        again = replace(record, attempt=record.attempt + 1, issued=False)
        self._records[record.ordinal] = again
        self._emit("returned", again, reason)

    def _move(self, record: GroupRecord, state: State) -> None:
        before = self._records[record.ordinal].state
        self._states[before] -= 1
        self._states[state] += 1
        self._records[record.ordinal] = replace(record, state=state)
        self._check()

    def _end(self, record: GroupRecord, end: End, detail: str = "") -> None:
        before = self._records.pop(record.ordinal).state
        self._states[before] -= 1
        self._totals[end] += 1
        self._emit(end, record, detail)
        self._check()

    def _emit(self, kind: EventKind, record: GroupRecord, detail: str = "") -> None:
        event = GroupEvent(kind, record.ordinal, record.attempt, self.step, self.version, record.version, detail)
        self._on_event(event)

    def _check(self) -> None:
        counts = self.counts
        if counts.admitted != counts.active + counts.ended or counts.active != len(self._records):
            raise LedgerError(f"the ledger does not balance: {counts}, {len(self._records)} records")
