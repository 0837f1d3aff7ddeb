from __future__ import annotations

import dataclasses
import hashlib
import logging
from pathlib import Path

from asyncrl.config.recipe import Recipe
from asyncrl.observability.metrics import Record

logger = logging.getLogger(__name__)


class WandbSink:
    """A Weights & Biases run; recorded offline below `<run>/wandb` when no login is found."""

    def __init__(self, recipe: Recipe, name: str, directory: Path) -> None:
        import wandb

        logged_in = bool(wandb.api.api_key)
        if not logged_in:
            logger.warning("no W&B login: recording offline; `wandb sync %s/wandb/offline-run-*` uploads it", directory)
        self._run = wandb.init(
            project=recipe.observability.wandb_project,
            name=name,
            id=f"{name}-{hashlib.sha256(str(directory).encode()).hexdigest()[:8]}",
            resume="allow",
            dir=str(directory),
            mode="online" if logged_in else "offline",
            config=dataclasses.asdict(recipe),
            settings=wandb.Settings(console="off", silent=True),
        )

        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, record: Record) -> None:
        self._run.log(dict(record))  # by its own "step": a run that goes back to a checkpoint repeats steps

    def close(self) -> None:
        self._run.finish()
