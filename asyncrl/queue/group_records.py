"""What the ledger keeps of groups, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.types import LedgerCounts, Ticket

State = Literal["running", "ready", "leased"]
End = Literal["trained", "filtered", "expired", "failed"]


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """An unfinished group. `version`: of its oldest token, or of its admission; of a leased group, of its oldest token
    that is trained. `failures` count against the budget.

    `issued` is False while a running group waits to be handed out (again). `kept`: tokens of it, not older than
    `version`, wait with it.
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
    """All that a ledger is."""

    step: int
    version: int
    next_ordinal: int
    counts: LedgerCounts
    records: tuple[GroupRecord, ...]
