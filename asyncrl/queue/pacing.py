"""When groups are admitted within the limit on the lag: as early as it allows, or just in time. Pure: no clock, no I/O.

A group that is ready long before its step ages in the queue for nothing. Where training is the slower side the queue is
then full, and every token has the largest lag that is allowed. Just in time, a group is admitted so early that it will
probably be ready when the step that trains it asks for it, and no earlier:

    wanted(now) = B (1 + floor((G + m - t) / T))        groups that are running or ready; 0 where G + m < t

B: groups per step. G: time of a group from admission to ready, a high quantile of the last ones. T: time from a lease
to the next question for one, which is what the trainer needs; not counted is what it waits. t: time until the next such
question, 0 while one waits. m: a margin that grows with every wait of the trainer and shrinks slowly without one, since
G and T change and the last of B groups counts.

Where generation is the slower side T is short against G, and the formula asks for as many groups as the limit allows. A
step that waits is never refused groups (t = 0), so pacing can slow a run down, and cannot stop it. The hard bound is
that of `staleness.py`, whatever is wanted here.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal, Protocol

from asyncrl.types import LedgerCounts

PacingName = Literal["eager", "just_in_time"]

QUANTILE = 0.9
HISTORY_STEPS = 8
"""Steps whose groups and times are remembered."""
WAIT_SHARE = 0.005
"""A wait that is a larger share of T grows the margin."""
GROWTH, DECAY = 2.0, 0.02
"""Of the margin: how much of a wait is added to it, twice as much for each wait in a row; which share of it is taken
away after a step without one."""
MOST_DOUBLINGS = 4
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

    def leased(self, now: float) -> None: ...

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

    def leased(self, now: float) -> None:
        pass

    def wanted(self, now: float) -> float:
        return math.inf

    def next_change(self, now: float) -> float | None:
        return None


class JustInTime:
    """Owns the times of the last groups and steps, and the margin."""

    def __init__(self, groups_per_step: int) -> None:
        self._size = groups_per_step
        self._running: dict[int, float] = {}
        self._generation_s: deque[float] = deque(maxlen=HISTORY_STEPS * groups_per_step)
        self._training_s: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._leased_at: float | None = None
        self._asked_at: float | None = None
        self._margin_s = 0.0
        self._waits = 0
        """Steps in a row that waited."""

    def begun(self, ordinal: int, now: float) -> None:
        self._running[ordinal] = now

    def ready(self, ordinal: int, now: float) -> None:
        began = self._running.pop(ordinal, None)
        if began is not None:
            self._generation_s.append(now - began)

    def gone(self, ordinal: int) -> None:
        self._running.pop(ordinal, None)

    def asked(self, now: float) -> None:
        if self._asked_at is not None:
            return
        self._asked_at = now
        if self._leased_at is not None:
            self._training_s.append(now - self._leased_at)

    def leased(self, now: float) -> None:
        if self._asked_at is not None and self._training_s:
            waited = now - self._asked_at
            if waited > WAIT_SHARE * self._step_s():
                self._margin_s += GROWTH * 2**self._waits * waited
                self._waits = min(self._waits + 1, MOST_DOUBLINGS)
            else:
                self._waits = 0
                self._margin_s *= 1 - DECAY
        self._leased_at, self._asked_at = now, None

    def wanted(self, now: float) -> float:
        if not self._generation_s or not self._training_s:
            return math.inf
        early = self._horizon_s() - self._until_asked(now) + ROUNDING_S
        return 0.0 if early < 0 else self._size * (1 + math.floor(early / self._step_s()))

    def next_change(self, now: float) -> float | None:
        if not self._generation_s or not self._training_s or self._asked_at is not None:
            return None
        step_s, early = self._step_s(), self._horizon_s() - self._until_asked(now)
        if self._until_asked(now) <= 0:
            return None  # the trainer is late: it asks any moment
        return now - early if early < 0 else now + step_s * (1 + math.floor(early / step_s)) - early

    def _until_asked(self, now: float) -> float:
        if self._asked_at is not None or self._leased_at is None:
            return 0.0
        return max(0.0, self._leased_at + self._step_s() - now)

    def _step_s(self) -> float:
        ordered = sorted(self._training_s)
        return max(1e-6, ordered[len(ordered) // 4])  # rather early than late

    def _horizon_s(self) -> float:
        ordered = sorted(self._generation_s)
        return ordered[min(len(ordered) - 1, math.ceil(QUANTILE * len(ordered)) - 1)] + self._margin_s


def build_pacing(name: PacingName, groups_per_step: int) -> Pacing:
    return Eager() if name == "eager" else JustInTime(groups_per_step)


def shortfall(pacing: Pacing, now: float, counts: LedgerCounts, filtered_share: float) -> float:
    """New groups that the pacing wants now, some of which will be filtered; below 1: none.

    Args:
        filtered_share: of the last groups that ended, those without a learning signal.
    """
    kept = max(LEAST_KEPT_SHARE, 1.0 - filtered_share)
    return pacing.wanted(now) / kept - counts.running - counts.ready
