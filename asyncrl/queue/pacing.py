"""When groups are admitted within the limit on the lag: as early as possible, or just in time. Pure: no clock, no I/O.

A group that is ready long before its step only ages in the queue. If training is the slower side, the queue is always
full, and every token has the largest allowed lag. Just-in-time pacing admits groups late, such that they are probably
ready when their step asks for them:

    wanted(now) = R + B (1 + floor((H - t) / T))    running or ready groups; R if H < t

    B   groups per step
    T   seconds the trainer needs per step (lease to next lease request, minus its waiting), median of recent steps
    t   seconds until the next lease request; minus the seconds waited so far if a step waits
    H   lead: seconds from the start of a step's groups to its lease request
    R   reserve: extra groups, since a step takes any B ready groups and can leave R slow ones to the next step

H and R follow from recent blocks. A block is B groups in order of admission, which took D_1 <= .. <= D_B from admission
to ready. The step that trains it needs the lead

    R = 0:  D_B
    R > 0:  max(D_B - (max_lag - 1) T, b)
            b: B-th smallest of D_1 .. D_B and of D' - T, where D' are the R slowest times of the previous block

* The first term keeps every group from being overdue. Where it is near T or above, a reserve does not help: the need is
  D_B.
* A step that asks earlier than expected needs that much more.
* A step that waited needed at least the median time from admission to lease of its groups: D shows neither filtered and
  failed groups nor their replacements.

H is the smallest lead with which recent steps would have waited 0.3 % of their time, or half of that with a reserve:

    sum_i max(0, needed_i - H)  <=  0.003 sum_i T_i

R minimises R / B + H / T, the age of groups in steps.

If generation is the slower side, T is short compared with D, and the formula asks for as many groups as the limit
allows. Pacing can slow a run down but not stop it: a waiting step has t <= 0, so its groups are wanted, and B more
after each further T. `staleness.py` keeps the hard bound whatever pacing wants.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from asyncrl.config.recipe import Recipe
from asyncrl.types import LedgerCounts

HISTORY_STEPS = 32
"""Number of recent steps from which the lead is learned."""
NEWEST_STEPS = 8
"""Number of recent steps whose median is T."""
WAIT_SHARE = 0.003
"""Largest share of the trainer's time that it may wait for groups."""
RESERVE_WAIT_SHARE = WAIT_SHARE / 2
"""The same with a reserve, whose need is known less exactly."""
RESERVE_BLOCKS = 6
"""Blocks observed before a reserve is tried."""
RESERVE_LATE = 0.8
"""In T: from this lateness of the slowest group on, a reserve does not help."""
FORGOTTEN = 2
"""How often the crowd of the start is forgotten: first the groups from before any step was measured, then the groups
that ran next to them."""
ROUNDING_S = 1e-6
LEAST_KEPT_SHARE = 0.1
"""Lower bound for the estimated share of groups that are not filtered."""


class Pacing:
    """Decides how many groups should exist; here as many as the limit allows (eager). Times are seconds of any one
    clock."""

    def begun(self, ordinal: int, now: float) -> None:
        """A group is admitted, or issued again."""

    def ready(self, ordinal: int, now: float) -> None:
        """The group is complete."""

    def gone(self, ordinal: int) -> None:
        """The group will not become ready."""

    def asked(self, now: float) -> None:
        """The trainer asks for the groups of a step. Repeated requests while it waits change nothing."""

    def leased(self, ordinals: Sequence[int], now: float) -> None:
        """A step trains these groups."""

    def wanted(self, now: float) -> float:
        """Groups that should be running or ready; infinite: as many as the limit allows."""
        return math.inf

    def next_change(self, now: float) -> float | None:
        """When `wanted` grows without any of the calls above; None: never."""
        return None


@dataclass(slots=True)
class _Group:
    """`ended`: ready or gone."""

    began: float
    block: int
    ended: bool = False


@dataclass(slots=True)
class _Block:
    """`left`: groups that have not ended or were not admitted yet. `took_s`: times of the groups that became ready."""

    left: int
    took_s: list[float] = field(default_factory=list)


class JustInTime(Pacing):
    """Owns the times of the untrained groups and of the last steps."""

    def __init__(self, groups_per_step: int, max_lag: int) -> None:
        self._size = groups_per_step
        self._max_lag = max_lag
        self._groups: dict[int, _Group] = {}
        self._num_begun = 0
        self._blocks: dict[int, _Block] = {}
        self._complete: list[list[float]] = []
        """Times of the blocks that have ended since the last lease, each in ascending order."""
        self._before: list[float] = []
        """Times of the last block before `_complete`."""
        self._crowd = 0
        """Blocks that were admitted together at the start. Their times are forgotten once later blocks are known."""
        self._forgotten = 0
        """How often times were forgotten, at most `FORGOTTEN`."""
        self._trained_s: deque[float] = deque(maxlen=HISTORY_STEPS)
        # Candidates for the reserve: 0 and powers of 2 up to half a step.
        reserves = [0, *(1 << power for power in range(groups_per_step.bit_length()) if 2 << power <= groups_per_step)]
        self._needed_s: dict[int, deque[float]] = {reserve: deque(maxlen=HISTORY_STEPS) for reserve in reserves}
        """Needed leads of the recent blocks, by reserve."""
        self._leased_at: float | None = None
        self._asked_at: float | None = None
        self._step_s = self._lead_s = 0.0
        self._reserve = 0

    def begun(self, ordinal: int, now: float) -> None:
        number = self._num_begun // self._size
        self._num_begun += 1
        self._groups[ordinal] = _Group(now, number)
        self._blocks.setdefault(number, _Block(self._size))
        if not self._trained_s:
            self._crowd = number + 1

    def ready(self, ordinal: int, now: float) -> None:
        if (group := self._groups.get(ordinal)) is not None:
            self._end(group, [now - group.began])

    def gone(self, ordinal: int) -> None:
        if (group := self._groups.pop(ordinal, None)) is not None:
            self._end(group, [])

    def _end(self, group: _Group, took_s: list[float]) -> None:
        if group.ended:
            return
        group.ended, block = True, self._blocks[group.block]
        block.left -= 1
        block.took_s += took_s
        if block.left == 0:
            del self._blocks[group.block]
            if block.took_s and not (self._forgotten == FORGOTTEN and group.block < self._crowd):
                self._complete.append(sorted(block.took_s))

    def asked(self, now: float) -> None:
        if self._asked_at is None:
            self._asked_at = now

    def leased(self, ordinals: Sequence[int], now: float) -> None:
        groups = [group for ordinal in ordinals if (group := self._groups.pop(ordinal, None)) is not None]
        if groups and self._asked_at is not None and self._leased_at is not None:
            if self._forgotten < FORGOTTEN and all(group.block >= self._crowd for group in groups):
                self._forget_crowd()
            trained, waited = self._asked_at - self._leased_at, now - self._asked_at
            early = (self._step_s or trained) - trained
            self._trained_s.append(trained)
            self._step_s = max(1e-6, median(list(self._trained_s)[-NEWEST_STEPS:]))
            had = now - median(group.began for group in groups) if waited > WAIT_SHARE * trained else None
            self._learn(early, had)
            self._choose()
        self._leased_at, self._asked_at = now, None

    def _forget_crowd(self) -> None:
        self._forgotten += 1
        if self._forgotten < FORGOTTEN:
            self._crowd = -(-self._num_begun // self._size)
        self._trained_s.clear()
        self._complete.clear()
        for needed_s in self._needed_s.values():
            needed_s.clear()

    def _learn(self, early: float, had: float | None) -> None:
        """`had`: if the step has waited, the median time from admission to lease of its groups."""
        for took_s in self._complete or [[]] * (had is not None):
            for reserve, needed_s in self._needed_s.items():
                needed = self._needed(took_s, reserve) + early if took_s else 0.0
                needed_s.append(max(needed, had) if had is not None and reserve <= self._reserve else needed)
            self._before = took_s or self._before
        self._complete.clear()

    def _needed(self, took_s: Sequence[float], reserve: int) -> float:
        """The lead that a step with this block needs if it asks when expected."""
        longest = took_s[-1]
        late = longest - (self._max_lag - 1) * self._step_s
        if reserve == 0 or late > RESERVE_LATE * self._step_s:
            return longest
        left = max(1, round(reserve * len(took_s) / self._size))  # scaled down, since groups may have been filtered
        both = sorted([*took_s, *(took - self._step_s for took in self._before[-left:])])
        return max(both[len(took_s) - 1], late)

    def _choose(self) -> None:
        least, trained_s = math.inf, sum(self._trained_s)
        for reserve, needed_s in self._needed_s.items():
            if not needed_s or (reserve and len(needed_s) < RESERVE_BLOCKS):
                break
            share = RESERVE_WAIT_SHARE if reserve else WAIT_SHARE
            lead = least_lead(needed_s, share * trained_s * len(needed_s) / len(self._trained_s))
            if (older := reserve / self._size + lead / self._step_s) < least:
                least, self._reserve, self._lead_s = older, reserve, lead

    def wanted(self, now: float) -> float:
        if not self._needed_s[0]:
            return math.inf
        early = self._lead_s - self._until_asked(now) + ROUNDING_S
        return self._reserve + (0 if early < 0 else self._size * (1 + math.floor(early / self._step_s)))

    def next_change(self, now: float) -> float | None:
        if not self._needed_s[0]:
            return None
        early = self._lead_s - self._until_asked(now)
        after = -early if early < 0 else self._step_s * (1 + math.floor(early / self._step_s)) - early
        if self._asked_at is None and after > self._until_asked(now) + ROUNDING_S:
            return None  # the trainer asks before that
        return now + after

    def _until_asked(self, now: float) -> float:
        """Below 0: the trainer has been waiting for this long."""
        if self._asked_at is not None:
            return self._asked_at - now
        if self._leased_at is None:
            return 0.0
        return max(0.0, self._leased_at + self._step_s - now)


def least_lead(needs: Sequence[float], allowed: float) -> float:
    """The smallest lead, at least 0, such that `needs` exceed it by at most `allowed` in total."""
    ordered, over = sorted([*needs, 0.0], reverse=True), 0.0
    for count, (need, following) in enumerate(pairwise(ordered), start=1):
        if over + count * (need - following) > allowed:
            return max(0.0, need - (allowed - over) / count)
        over += count * (need - following)
    return 0.0


def build_pacing(recipe: Recipe) -> Pacing:
    return Pacing() if recipe.pacing == "eager" else JustInTime(recipe.batch.groups_per_step, recipe.max_lag)


def shortfall(pacing: Pacing, now: float, counts: LedgerCounts, filtered_share: float) -> float:
    """New groups that the pacing wants now, including groups that will be filtered; below 1: none.

    Args:
        filtered_share: of the last ended groups.
    """
    kept = max(LEAST_KEPT_SHARE, 1.0 - filtered_share)
    return pacing.wanted(now) / kept - counts.running - counts.ready
