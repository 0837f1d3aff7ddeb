from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import check_ranges
from asyncrl.ranges import NonNegative, NonNegativeInt, Positive

LEAST_REPLICA_RESTARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    max_replica_restarts: NonNegativeInt | None = None
    """Replacements of replicas (they died or got wrong weights) allowed within window_s; one more stops the run. None:
    as many as there are replicas, but at least 3."""
    max_restarts: NonNegativeInt = 3
    """The same for restarts of the rollouter, and of the training side (trainer ranks and message queue); each has its
    own count."""
    window_s: Positive = 3600.0
    """Seconds after which a restart no longer counts."""
    rejoin_timeout_s: NonNegative = 30.0
    """How long a suspended replica may take to answer again before it is replaced; nothing waits for it. A replica is
    suspended when it answers too late, for example because its process is stopped."""
    stall_timeout_s: Positive | None = None
    """The run stops when nothing in it makes progress for this long, and writes the stacks of all its processes. None:
    twice the longest wait that the recipe allows. A smaller value may stop a run that waits for one long response."""

    def __post_init__(self) -> None:
        check_ranges("recovery.", self)

    def replica_restarts(self, num_replicas: int) -> int:
        """`max_replica_restarts`, set or derived."""
        if self.max_replica_restarts is not None:
            return self.max_replica_restarts
        return max(LEAST_REPLICA_RESTARTS, num_replicas)

    def replicas_per_response(self, num_replicas: int) -> int:
        """A response fails when this many replicas died while they worked on it: it may be what kills them. Of a small
        budget the pool gives up first; a large one is not for one response to spend."""
        return min(LEAST_REPLICA_RESTARTS, self.replica_restarts(num_replicas)) + 1
