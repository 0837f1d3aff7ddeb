from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import check_ranges, require
from asyncrl.ranges import PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    groups_per_step: PositiveInt = 16
    """Prompt groups that one step trains."""
    group_size: PositiveInt = 8
    """Trajectories per prompt group."""
    num_minibatches: int = 1
    """Optimizer updates per epoch of a step, each over its share of the groups. global_steps counts steps."""
    num_epochs: PositiveInt = 1
    """Passes of a step over its groups."""

    def __post_init__(self) -> None:
        check_ranges("batch.", self)
        require(
            1 <= self.num_minibatches <= self.groups_per_step,
            asked=f"batch.num_minibatches={self.num_minibatches} of batch.groups_per_step={self.groups_per_step}",
            found="every update needs a group",
            do="set batch.num_minibatches between 1 and batch.groups_per_step",
        )
