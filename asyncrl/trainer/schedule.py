"""The learning rate, as a pure function of the step: a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from typing import Literal

from asyncrl.config.trainer import TrainerConfig


def scheduled_rate(
    config: TrainerConfig, step: int, total_steps: int, *, peak: float | None = None, start: int = 0
) -> float:
    """`learning_rate` with the settings of `config`.

    `total_steps`: end of the decay where `decay_steps` is not set. `peak` None: `lr`. `start`: the first step that
    trains; before it the rate is 0, and the warm-up starts there.
    """
    if 0 <= step < start:
        return 0.0
    return learning_rate(
        step - start,
        peak=config.lr if peak is None else peak,
        warmup_steps=config.warmup_steps,
        schedule=config.schedule,
        decay_steps=(config.decay_steps or total_steps) - start,
        min_fraction=config.min_lr_fraction,
    )


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    decay_steps: int = 0,
    min_fraction: float = 0.0,
) -> float:
    """The rate of the optimizer step that starts at `global_steps == step`: `peak * (step + 1) / warmup_steps` over
    the first `warmup_steps` steps, then by `schedule` from `peak` to `peak * min_fraction`, which it has from step
    `decay_steps` on. Raises ValueError: `step` is negative."""
    if step < 0:
        raise ValueError(f"step is {step}; global_steps counts from 0")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    done = min(1.0, (step - warmup_steps) / max(decay_steps - warmup_steps, 1))
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (min_fraction + (1 - min_fraction) * left)
