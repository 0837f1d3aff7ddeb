"""The learning rate, as a pure function of the step: a resumed run needs no scheduler state."""

from __future__ import annotations


def learning_rate(step: int, *, peak: float, warmup_steps: int) -> float:
    """The rate of the optimizer step that starts at `global_steps == step`: `peak * (step + 1) / warmup_steps` over
    the first `warmup_steps` steps, then `peak`. Raises ValueError: `step` is negative."""
    if step < 0:
        raise ValueError(f"step is {step}; global_steps counts from 0")
    if step >= warmup_steps:
        return peak
    return peak * (step + 1) / warmup_steps
