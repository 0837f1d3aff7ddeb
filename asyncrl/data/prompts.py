"""Records of prompts: the sources of a mixture, and the rendered rows of a held-out set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncrl.data.rows import PromptRow


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows `[start, stop)` of the training prompts come from the source `name`, which has `weight` in the mixture."""

    name: str
    weight: float
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class RenderedPrompts:
    """The rows of a held-out set with their prompts: `prompt_ids[i]`, [P] int32, is of `rows[i]`. `num_dropped` rows
    were too long. Training prompts are a `data.training_set.TrainingSet`."""

    rows: tuple[PromptRow, ...]
    prompt_ids: tuple[np.ndarray, ...]
    num_dropped: int
