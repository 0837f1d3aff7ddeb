from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import require_at_least, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every_steps: int = 20
    """Optimizer steps between checkpoints; one is always written at the end. 0 writes only that one."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    background: bool = True
    """Write while training goes on, from a copy of the trainer's state in host memory; else training waits."""
    timeout_s: float = 1800.0
    """Longest that writing one may take."""
    max_failures: int = 2
    """Checkpoints in a row that may fail to be written (no space, say) before the run stops."""

    def __post_init__(self) -> None:
        require_at_least("checkpoint.every_steps", self.every_steps, 0)
        require_at_least("checkpoint.keep", self.keep, 1)
        require_positive("checkpoint.timeout_s", self.timeout_s)
        require_at_least("checkpoint.max_failures", self.max_failures, 0)
