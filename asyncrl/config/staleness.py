from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config.checks import check_ranges
from asyncrl.ranges import NonNegativeInt, Positive, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessConfig:
    max_lag: NonNegativeInt = 2
    """Limit on the lag of every trained token, in optimizer steps. Read in mode fully_async; sync has 0, one_step_off
    has 1."""
    publish_every_steps: PositiveInt = 1
    """Optimizer steps between publishes; at most max_lag + 1."""
    on_overdue: Literal["wait", "refill", "mask"] = "wait"
    """What a step does when a group that it must train is not ready although enough others are. wait: wait for it.
    refill: end the group as `expired` and generate its prompt again. mask: train the group in a later step, without the
    tokens that are over the limit by then."""
    overdue_timeout_s: Positive = 600.0
    """Longest wait for the groups of one step, or for a drain before a publish; then the run ends with an error."""

    def __post_init__(self) -> None:
        check_ranges("staleness.", self)
