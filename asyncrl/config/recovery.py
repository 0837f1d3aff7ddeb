from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import check_ranges
from asyncrl.ranges import NonNegative, NonNegativeInt, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    max_replica_restarts: NonNegativeInt = 3
    """Replicas that may be replaced within window_s, because they died or got wrong weights, before the run stops."""
    max_restarts: NonNegativeInt = 3
    """The same for the rollouter, and for the training side (trainer ranks and message queue), each by itself."""
    window_s: Positive = 3600.0
    """Seconds after which a restart no longer counts."""
    rejoin_timeout_s: NonNegative = 30.0
    """How long a replica that answers too late (it is stopped, say) may take to answer again before it is replaced.
    Nothing waits for it meanwhile."""
    stall_timeout_s: Positive | None = None
    """The run stops when nothing in it makes progress for this long, with the stacks of all its processes. None: twice
    the longest wait that the recipe allows; with less, a run that waits for one long response may be stopped."""

    def __post_init__(self) -> None:
        check_ranges("recovery.", self)
