"""Which groups may be admitted and which must be trained now. Pure: no clock, no I/O.

Symbols: `B` groups per step, `eta` the lag limit, `g` the step to be trained next, `v` the published version.
The deadline of a group is the last step that may train it: version of its oldest token (of its admission while it
has none) + eta. A state is feasible when earliest-deadline-first can still serve every active group in time: for
every `d >= g`, the active groups with deadline <= d number at most `(d - g + 1) * B`. Admission and lease each keep
a feasible state feasible, so no trained token ever has a lag over eta.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """An active group as the policy sees it."""

    ordinal: int
    deadline: int


@dataclass(frozen=True, slots=True)
class Selection:
    """`chosen`: ordinals of the B groups to lease, oldest deadline first; empty while the step has to wait.

    `missing`: ready groups short of B. `overdue`: mandatory groups that are not ready although B others are.
    """

    chosen: tuple[int, ...]
    missing: int = 0
    overdue: int = 0


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    groups_per_step: int
    max_lag: int

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_lag < 0:
            raise ValueError(f"groups_per_step {self.groups_per_step} and max_lag {self.max_lag} out of range")

    def deadline(self, version: int) -> int:
        """The last step that may train a group whose oldest token (or admission) has `version`."""
        return version + self.max_lag

    def admissible(self, *, step: int, version: int, active: int) -> int:
        """How many more groups may be admitted at the published `version` when `active` groups are not yet trained.

        A new group gets the latest deadline of all, `version + max_lag`, so only the total is constrained.
        """
        return max(0, (version + self.max_lag - step + 1) * self.groups_per_step - active)

    def is_feasible(self, deadlines: Sequence[int], step: int) -> bool:
        ordered = sorted(deadlines)
        return all(
            position + 1 <= (deadline - step + 1) * self.groups_per_step for position, deadline in enumerate(ordered)
        )

    def select(self, *, step: int, ready: Sequence[Candidate], unready: Sequence[Candidate]) -> Selection:
        """The groups that `step` trains: earliest deadline first among the ready ones, if the rest stays feasible.

        For every d, step g must take at least `active(d) - (d - g) * B` groups with deadline <= d. Taking the
        earliest deadlines maximises that number for every d at once, so if it falls short the step must wait.
        """
        size = self.groups_per_step
        ordered = sorted(ready, key=lambda c: (c.deadline, c.ordinal))
        chosen = ordered[:size]
        chosen_deadlines = [c.deadline for c in chosen]
        active_deadlines = sorted([c.deadline for c in ready] + [c.deadline for c in unready])
        overdue = 0
        for deadline in sorted(set(active_deadlines)):
            mandatory = bisect_right(active_deadlines, deadline) - (deadline - step) * size
            overdue = max(overdue, mandatory - bisect_right(chosen_deadlines, deadline))
        if len(chosen) < size:
            return Selection((), missing=size - len(chosen), overdue=max(0, overdue))
        if overdue > 0:
            return Selection((), overdue=overdue)
        return Selection(tuple(c.ordinal for c in chosen))
