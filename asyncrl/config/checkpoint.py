from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import check_ranges
from asyncrl.ranges import NonNegativeInt, Positive, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every_steps: NonNegativeInt = 20
    """Optimizer steps between checkpoints; one is always written at the end. 0 writes only that one."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""
    background: bool = True
    """Write while training goes on, from a copy of the trainer's state in host memory; else training waits."""
    timeout_s: Positive = 1800.0
    """Longest that writing one may take."""
    max_failures: NonNegativeInt = 2
    """Checkpoints in a row that may fail to be written (no space, say) before the run stops."""

    def __post_init__(self) -> None:
        check_ranges("checkpoint.", self)
