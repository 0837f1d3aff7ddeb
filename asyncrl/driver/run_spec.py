"""Input and result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.config.hidden import Hidden
from asyncrl.config.recipe import Recipe
from asyncrl.data.row_table import RenderedPrompts
from asyncrl.data.training_set import TrainingSet


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A checked run. `start_from`: checkpoint to continue from, if any. `written`: the recipe without secrets; `hide`:
    removes secrets from all other texts. `serving_key`: of the clients of `rollout.serve`."""

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
    """`signal`: number of the signal that ended the run early; None if it reached `run.max_steps`."""

    step: int
    signal: int | None
