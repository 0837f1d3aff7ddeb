"""The records that the replay keeps of groups, snapshots and steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.audit.audit_report import COUNTS


class GroupNow(NamedTuple):
    """The latest state of an ordinal. `version`: of its oldest token, or of its admission. A tuple, because one is made
    for every event and a frozen dataclass takes three times as long to make."""

    state: str
    attempt: int
    version: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The moment of a snapshot."""

    line: int
    journal: int
    step: int
    version: int
    next_ordinal: int
    counts: Mapping[str, int]


NOTHING = Mark(0, 0, 0, 0, 0, dict.fromkeys(COUNTS, 0))
"""Before the run."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A `step` event that the queue has not committed yet."""

    line: int
    ordinals: tuple[int, ...]
    lag_max: int
