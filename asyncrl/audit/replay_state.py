"""What the replay remembers of groups, snapshots and steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.audit.audit_report import COUNTS


class GroupNow(NamedTuple):
    """The last that is known of an ordinal. `version`: of its oldest token, or of its admission. One is made for every
    event: a tuple is made in a third of the time that a frozen dataclass takes."""

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
