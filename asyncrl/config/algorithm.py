from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config.checks import require, require_at_least, require_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    advantage: Literal["grpo"] = "grpo"
    """grpo: reward minus the group's mean, divided by the group's standard deviation."""
    loss: Literal["clipped_surrogate"] = "clipped_surrogate"
    """clipped_surrogate: policy gradient on the ratio of policy to behaviour probability, clipped token by token."""
    clip_low: float = 0.2
    """The ratio is held above 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is held below 1 + clip_high."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal end `filtered` and the next prompt takes their slot."""
    max_filtered_fraction: float = 0.99
    """With dynamic_sampling: share of the last filtered_window ended groups that may be `filtered` before the run
    stops, since its data has nothing left to learn. 1 never stops it."""
    filtered_window: int = 256
    """Ended groups that max_filtered_fraction looks at."""

    def __post_init__(self) -> None:
        require_at_least("algorithm.clip_low", self.clip_low, 0)
        require_at_least("algorithm.clip_high", self.clip_high, 0)
        require_fraction("algorithm.max_filtered_fraction", self.max_filtered_fraction)
        require_at_least("algorithm.filtered_window", self.filtered_window, 1)
        require(
            self.clip_low <= 1,
            asked=f"algorithm.clip_low={self.clip_low}",
            found="the ratio is never below 0, so clip_low over 1 clips nothing",
            do="set algorithm.clip_low in [0, 1]",
        )
