from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.config.checks import check_ranges, require
from asyncrl.ranges import NonNegativeInt

SINKS = ("wandb", "tensorboard")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    sinks: list[str] = field(default_factory=list)
    """Metric sinks besides metrics.jsonl: wandb, tensorboard."""
    wandb_project: str = "asyncrl"
    """W&B project. Without a login the run is recorded offline."""
    samples_per_step: NonNegativeInt = 2
    """Trajectories per admission version that are written to samples.jsonl."""
    trace_every_groups: NonNegativeInt = 16
    """Every n-th group records in spans.jsonl when its requests and rewards ran, for `asyncrl-report --trace`; 0: none.
    """
    progress: bool = True
    """Live progress on a terminal; otherwise one line a step."""

    def __post_init__(self) -> None:
        check_ranges("observability.", self)
        unknown = sorted(set(self.sinks) - set(SINKS))
        require(
            not unknown,
            asked=f"observability.sinks={list(self.sinks)}",
            found=f"unknown sinks {unknown}; metrics.jsonl is always written",
            do=f"choose from {list(SINKS)}",
        )
