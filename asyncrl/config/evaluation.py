from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import require_at_least, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    every_steps: int = 0
    """Optimizer steps between held-out evaluations; also before the first step and after the last. 0: none."""
    max_prompts: int = 256
    """At most this many rows of each held-out set, the first ones."""
    temperature: float = 0.0
    """0 is greedy."""
    timeout_s: float = 1800.0
    """Longest that the evaluation of one held-out set may take."""

    def __post_init__(self) -> None:
        require_at_least("eval.every_steps", self.every_steps, 0)
        require_at_least("eval.max_prompts", self.max_prompts, 1)
        require_at_least("eval.temperature", self.temperature, 0)
        require_positive("eval.timeout_s", self.timeout_s)
