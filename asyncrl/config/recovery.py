from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import require_at_least, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    max_replica_restarts: int = 3
    """Replicas that may be replaced within window_s, because they died or got wrong weights, before the run stops."""
    max_restarts: int = 3
    """The same for the rollouter, and for the training side (trainer ranks and message queue), each by itself."""
    window_s: float = 3600.0
    """Seconds after which a restart no longer counts."""
    rejoin_timeout_s: float = 30.0
    """How long a replica that answers too late (it is stopped, say) may take to answer again before it is replaced.
    Nothing waits for it meanwhile."""
    stall_timeout_s: float | None = None
    """The run stops when nothing in it makes progress for this long, with the stacks of all its processes. None: twice
    the longest wait that the recipe allows; with less, a run that waits for one long response may be stopped."""

    def __post_init__(self) -> None:
        require_at_least("recovery.max_replica_restarts", self.max_replica_restarts, 0)
        require_at_least("recovery.max_restarts", self.max_restarts, 0)
        require_positive("recovery.window_s", self.window_s)
        require_at_least("recovery.rejoin_timeout_s", self.rejoin_timeout_s, 0)
        if self.stall_timeout_s is not None:
            require_positive("recovery.stall_timeout_s", self.stall_timeout_s)
