from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import require, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    groups_per_step: int = 16
    """Prompt groups that one step trains."""
    group_size: int = 8
    """Trajectories per prompt group."""
    num_minibatches: int = 1
    """Optimizer updates that one step takes, each over its share of the groups. global_steps counts steps."""
    num_epochs: int = 1
    """Times that a step goes over its groups."""

    def __post_init__(self) -> None:
        require_at_least("batch.groups_per_step", self.groups_per_step, 1)
        require_at_least("batch.group_size", self.group_size, 1)
        require_at_least("batch.num_epochs", self.num_epochs, 1)
        require(
            1 <= self.num_minibatches <= self.groups_per_step,
            asked=f"batch.num_minibatches={self.num_minibatches} of batch.groups_per_step={self.groups_per_step}",
            found="every update needs a group",
            do="set batch.num_minibatches between 1 and batch.groups_per_step",
        )
