from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    groups_per_step: int = 16
    """Prompt groups that one optimizer step trains."""
    group_size: int = 8
    """Trajectories per prompt group."""

    def __post_init__(self) -> None:
        require_at_least("batch.groups_per_step", self.groups_per_step, 1)
        require_at_least("batch.group_size", self.group_size, 1)
