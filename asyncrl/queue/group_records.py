"""The records that the ledger keeps of groups, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.types import LedgerCounts, Ticket

State = Literal["running", "ready", "leased"]
End = Literal["trained", "filtered", "expired", "failed"]


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """An unfinished group.

    `version` is that of its oldest token, or of its admission while it has none; of a leased group, that of its oldest
    trained token. `failures` counts against the retry budget. `issued` is False while a running group waits for a
    ticket. `kept` is True when tokens from a checkpoint, none older than `version`, wait with it.
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
