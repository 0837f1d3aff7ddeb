from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every_steps: int = 20
    """Optimizer steps between checkpoints; one is always written at the end. 0 writes only that one."""
    keep: int = 2
    """Newest checkpoints that are kept."""

    def __post_init__(self) -> None:
        require_at_least("checkpoint.every_steps", self.every_steps, 0)
        require_at_least("checkpoint.keep", self.keep, 1)
