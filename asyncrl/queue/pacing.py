"""When groups are admitted within the limit on the lag: as early as it allows, or just in time. Pure: no clock, no I/O.

A group that is ready long before its step ages in the queue for nothing. Where training is the slower side the queue is
then full, and every token has the largest lag that is allowed. Just in time, a group is admitted so early that it will
probably be ready when the step that trains it asks for it, and no earlier:

    wanted(now) = B (1 + floor((H - t) / T))        groups that are running or ready; 0 where H < t

B: groups per step. T: time from a lease to the next question for one, which is what the trainer needs; not counted is
what it waits; the median of the last steps. t: time until the next such question; minus what it has waited so far while
one waits. H: how long before that question the groups of a step begin. A step needed D, the time of its slowest group
from admission to ready, and more by as much as it asked earlier than expected; one that waited needed at least the time
from the admission of its first group to its lease, since groups that were filtered or failed, and others in their
place, do not show in D. H is the smallest lead with which the last steps would have waited 0.3 % of their time:

    sum_i max(0, needed_i - H)  <=  0.003 sum_i T_i

Where generation is the slower side T is short against D, and the formula asks for as many groups as the limit allows. A
step that waits is not refused its groups (t = 0), and after each T more of waiting those of a further step are wanted:
pacing can slow a run down, and cannot stop it. The hard bound is that of `staleness.py`, whatever is wanted here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Literal, Protocol

from asyncrl.types import LedgerCounts

PacingName = Literal["eager", "just_in_time"]

HISTORY_STEPS = 32
"""Steps that tell which lead is needed."""
NEWEST_STEPS = 8
"""Steps that tell how long the next one will take: their median."""
WAIT_SHARE = 0.003
"""Of the trainer's time, what waits for groups may take."""
ROUNDING_S = 1e-6
LEAST_KEPT_SHARE = 0.1
"""Of the groups that are generated, the share that is taken to be not filtered, at least."""


class Pacing(Protocol):
    """Decides how many groups should exist. Times are seconds of any one clock."""

    def begun(self, ordinal: int, now: float) -> None:
        """A group is admitted, or issued again."""
        ...

    def ready(self, ordinal: int, now: float) -> None: ...

    def gone(self, ordinal: int) -> None:
        """It will not become ready."""
        ...

    def asked(self, now: float) -> None:
        """The trainer asks for the groups of a step. Further questions while it waits change nothing."""
        ...

    def leased(self, ordinals: Sequence[int], now: float) -> None:
        """A step trains these groups."""
        ...

    def wanted(self, now: float) -> float:
        """Groups that should be running or ready; infinite: as many as the limit allows."""
        ...

    def next_change(self, now: float) -> float | None:
        """When `wanted` will be larger without any of the calls above; None: it will not."""
        ...


class Eager:
    """Admits as early as the limit allows."""

    def begun(self, ordinal: int, now: float) -> None:
        pass

    def ready(self, ordinal: int, now: float) -> None:
        pass

    def gone(self, ordinal: int) -> None:
        pass

    def asked(self, now: float) -> None:
        pass

    def leased(self, ordinals: Sequence[int], now: float) -> None:
        pass

    def wanted(self, now: float) -> float:
        return math.inf

    def next_change(self, now: float) -> float | None:
        return None


class JustInTime:
    """Owns the times of the groups that are not trained yet, and of the last steps."""

    def __init__(self, groups_per_step: int) -> None:
        self._size = groups_per_step
        self._begun_at: dict[int, float] = {}
        self._took_s: dict[int, float] = {}
        """Of the groups that are ready; no others are in it."""
        self._crowd: set[int] = set()
        """Groups of the start, generated all at once: what they take is forgotten once others are known."""
        self._trained_s: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._needed_s: deque[float] = deque(maxlen=HISTORY_STEPS)
        """With which lead each of the last steps would have waited for nothing."""
        self._leased_at: float | None = None
        self._asked_at: float | None = None
        self._step_s = self._lead_s = 0.0

    def begun(self, ordinal: int, now: float) -> None:
        self._begun_at[ordinal] = now
        if not self._needed_s:
            self._crowd.add(ordinal)

    def ready(self, ordinal: int, now: float) -> None:
        if (began := self._begun_at.get(ordinal)) is not None:
            self._took_s[ordinal] = now - began

    def gone(self, ordinal: int) -> None:
        self._begun_at.pop(ordinal, None)
        self._took_s.pop(ordinal, None)

    def asked(self, now: float) -> None:
        if self._asked_at is None:
            self._asked_at = now

    def leased(self, ordinals: Sequence[int], now: float) -> None:
        took = [self._took_s.pop(ordinal) for ordinal in ordinals if ordinal in self._took_s]
        began = [self._begun_at.pop(ordinal) for ordinal in ordinals if ordinal in self._begun_at]
        if took and self._asked_at is not None and self._leased_at is not None:
            if self._crowd and self._crowd.isdisjoint(ordinals):
                self._needed_s.clear()
                self._trained_s.clear()
                self._crowd.clear()
            trained, waited = self._asked_at - self._leased_at, now - self._asked_at
            early = (self._step_s or trained) - trained
            held_back = now - min(began) if waited > WAIT_SHARE * trained else 0.0
            self._needed_s.append(max(max(took) + early, held_back))
            self._trained_s.append(trained)
            self._step_s = max(1e-6, median(list(self._trained_s)[-NEWEST_STEPS:]))
            self._lead_s = least_lead(self._needed_s, WAIT_SHARE * sum(self._trained_s))
        self._leased_at, self._asked_at = now, None

    def wanted(self, now: float) -> float:
        if not self._needed_s:
            return math.inf
        early = self._lead_s - self._until_asked(now) + ROUNDING_S
        return 0.0 if early < 0 else self._size * (1 + math.floor(early / self._step_s))

    def next_change(self, now: float) -> float | None:
        if not self._needed_s:
            return None
        early = self._lead_s - self._until_asked(now)
        after = -early if early < 0 else self._step_s * (1 + math.floor(early / self._step_s)) - early
        if self._asked_at is None and after > self._until_asked(now) + ROUNDING_S:
            return None  # the trainer asks before that, or does so any moment
        return now + after

    def _until_asked(self, now: float) -> float:
        """Below 0: how long the trainer has been waiting."""
        if self._asked_at is not None:
            return self._asked_at - now
        if self._leased_at is None:
            return 0.0
        return max(0.0, self._leased_at + self._step_s - now)


def least_lead(needs: Sequence[float], allowed: float) -> float:
    """The smallest lead, at least 0, of which `needs` together want no more than `allowed` more."""
    ordered, over = sorted([*needs, 0.0], reverse=True), 0.0
    for count, (need, following) in enumerate(pairwise(ordered), start=1):
        if over + count * (need - following) > allowed:
            return max(0.0, need - (allowed - over) / count)
        over += count * (need - following)
    return 0.0


def build_pacing(name: PacingName, groups_per_step: int) -> Pacing:
    return Eager() if name == "eager" else JustInTime(groups_per_step)


def shortfall(pacing: Pacing, now: float, counts: LedgerCounts, filtered_share: float) -> float:
    """New groups that the pacing wants now, some of which will be filtered; below 1: none.

    Args:
        filtered_share: of the last groups that ended, those without a learning signal.
    """
    kept = max(LEAST_KEPT_SHARE, 1.0 - filtered_share)
    return pacing.wanted(now) / kept - counts.running - counts.ready
