"""What a run is asked to do, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.config.hidden import Hidden
from asyncrl.config.recipe import Recipe
from asyncrl.data.rows import RenderedPrompts
from asyncrl.data.training_set import TrainingSet


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run that has been checked. `start_from`: the checkpoint to go on from, if any. `written`: the recipe as others
    may read it; `hide`: for all other texts that they may read. `serving_key`: of the clients of `rollout.serve`."""

    recipe: Recipe
    name: str
    directory: RunDirectory
    start_from: Path | None
    train: TrainingSet
    held_out: Mapping[str, RenderedPrompts]
    written: Mapping[str, Any]
    hide: Hidden
    serving_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RunResult:
    """`signal`: the number of the signal that ended the run early, None when it reached `run.max_steps`."""

    step: int
    signal: int | None
