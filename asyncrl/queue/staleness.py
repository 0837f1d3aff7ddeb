"""Which groups may be admitted and which must be trained now. Pure: no clock, no I/O.

Symbols: `B` groups per step, `eta` the lag limit, `g` the step to be trained next, `v` the published version. The
deadline of a group is the last step that may train it whole: version of its oldest token (of its admission while it has
none) + eta. A state is feasible if earliest-deadline-first can still serve every active group in time: for every `d >=
g`, at most `(d - g + 1) * B` active groups have deadline <= d. Admission and lease each keep a feasible state feasible,
so no trained token ever has a lag over eta. docs/staleness.md has the full argument.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

OnOverdue = Literal["wait", "refill", "mask"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An active group as the policy sees it."""

    ordinal: int
    deadline: int


@dataclass(frozen=True, slots=True)
class Selection:
    """`chosen`: ordinals of the B groups to lease, oldest deadline first; empty while the step must wait.

    `missing`: ready groups short of B. `overdue`: mandatory groups that are not ready although B others are. `expire`:
    running groups that the caller must end before it selects again, so that the step can train others now.
    """

    chosen: tuple[int, ...]
    missing: int = 0
    overdue: int = 0
    expire: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """The rules of admission and lease. `on_overdue`: what a step does if B groups are ready but mandatory ones are
    not."""

    groups_per_step: int
    max_lag: int
    on_overdue: OnOverdue = "wait"

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_lag < 0:
            raise ValueError(f"groups_per_step {self.groups_per_step} and max_lag {self.max_lag} out of range")

    def limited(self, limit: int) -> StalenessPolicy:
        """The same rules with a lower limit. Raises ValueError: `limit` is above `max_lag`."""
        if limit > self.max_lag:
            raise ValueError(f"a limit of {limit} on the lag is above max_lag {self.max_lag}")
        return replace(self, max_lag=limit)

    def deadline(self, version: int) -> int:
        """The last step that may train all of a group whose oldest token (or admission) has `version`."""
        return version + self.max_lag

    def oldest_trainable(self, step: int) -> int:
        """The oldest version whose tokens `step` may train."""
        return step - self.max_lag

    def admissible(self, *, step: int, version: int, active: int) -> int:
        """How many more groups may be admitted at the published `version` while `active` groups are not yet trained.

        A new group gets the latest deadline, `version + max_lag`, so only the total is constrained.
        """
        return max(0, (version + self.max_lag - step + 1) * self.groups_per_step - active)

    def surplus(self, candidates: Sequence[Candidate], step: int) -> tuple[int, ...]:
        """The fewest groups to remove such that the rest is feasible. Empty under mask, which also trains late
        groups."""
        if self.on_overdue == "mask":
            return ()
        kept, dropped = 0, []
        for c in sorted(candidates, key=_oldest_first):
            if kept + 1 <= (c.deadline - step + 1) * self.groups_per_step:
                kept += 1
            else:
                dropped.append(c.ordinal)
        return tuple(dropped)

    def select(self, *, step: int, version: int, ready: Sequence[Candidate], unready: Sequence[Candidate]) -> Selection:
        """The groups that `step` trains: earliest deadline first among the ready ones, if the rest stays feasible.

        For every d, step g must take at least `active(d) - (d - g) * B` groups with deadline <= d. Taking the
        earliest deadlines maximises that number for every d at once. If it still falls short, the step must wait for
        mandatory groups, expire them, or train them late, as `on_overdue` says.
        """
        size = self.groups_per_step
        chosen = sorted(ready, key=_oldest_first)[:size]
        short = [] if self.on_overdue == "mask" else self._short(step, chosen, ready, unready)
        overdue = max((count for _, count in short), default=0)
        if len(chosen) < size:
            return Selection((), missing=size - len(chosen), overdue=overdue)
        if overdue:
            return Selection((), overdue=overdue, expire=self._give_up(version, short, unready))
        return Selection(tuple(c.ordinal for c in chosen))

    def _short(
        self, step: int, chosen: Sequence[Candidate], ready: Sequence[Candidate], unready: Sequence[Candidate]
    ) -> list[tuple[int, int]]:
        """The deadlines up to which `chosen` has too few groups, ascending, each with the number of missing groups."""
        taken = [c.deadline for c in chosen]
        active = sorted([c.deadline for c in ready] + [c.deadline for c in unready])
        counts = (
            (d, bisect_right(active, d) - (d - step) * self.groups_per_step - bisect_right(taken, d))
            for d in sorted(set(active))
        )
        return [(d, count) for d, count in counts if count > 0]

    def _give_up(self, version: int, short: list[tuple[int, int]], unready: Sequence[Candidate]) -> tuple[int, ...]:
        """Under refill, the running groups to expire: the fewest, oldest deadline first, that leave no shortage once
        their prompts are admitted again at `version`. Empty if expiring cannot help."""
        latest = self.deadline(version)
        if self.on_overdue != "refill" or short[-1][0] >= latest:
            return ()
        late = sorted((c for c in unready if c.deadline < latest), key=_oldest_first)
        deadlines = [c.deadline for c in late]
        if any(bisect_right(deadlines, d) < count for d, count in short):
            return ()
        return tuple(c.ordinal for c in late[: max(count for _, count in short)])


def _oldest_first(candidate: Candidate) -> tuple[int, int]:
    return candidate.deadline, candidate.ordinal
