from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import check_ranges
from asyncrl.ranges import NonNegativeInt, Positive, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every_steps: NonNegativeInt = 20
    """Optimizer steps between checkpoints; one is always written at the end. 0 writes only that one."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    background: bool = True
    """Write while training continues, from a copy of the trainer's state in host memory. False: training waits."""
    timeout_s: Positive = 1800.0
    """Time for writing one checkpoint. One that takes longer is written on while its processes answer; each such time
    counts as a failure."""
    max_failures: NonNegativeInt = 2
    """Failed checkpoints in a row (full disk, for example) that the run tolerates; one more stops it."""

    def __post_init__(self) -> None:
        check_ranges("checkpoint.", self)
