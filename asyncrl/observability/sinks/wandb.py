from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.recipe import Recipe
from asyncrl.errors import ConfigError, explain
from asyncrl.types.metrics import Record

logger = logging.getLogger(__name__)


class WandbSink:
    """A Weights & Biases run; without a login it is recorded offline below `<run>/wandb`. The first record starts it.
    After a failure the next record starts it again, as the same run."""

    def __init__(self, recipe: Recipe, written: Mapping[str, Any], name: str, directory: Path) -> None:
        """`written`: the recipe as others may read it. Raises ConfigError: W&B allows no project or run of this
        name."""
        import wandb

        run_id = f"{name}-{hashlib.sha256(str(directory).encode()).hexdigest()[:8]}"
        project = recipe.observability.wandb_project
        try:
            wandb.Settings(project=project, run_name=name, run_id=run_id)
        except Exception as error:
            asked = f"observability.sinks=[wandb] with observability.wandb_project={project} and run.name={name}"
            raise ConfigError(explain(asked, str(error), "give them other names")) from error
        self._directory = directory
        self._options = {"project": project, "name": name, "id": run_id, "config": dict(written)}
        self._run: Any = None

    def write(self, step: int, record: Record) -> None:
        try:
            if self._run is None:
                self._run = self._begin()
            self._run.log(dict(record))  # by its own "step": a run that goes back to a checkpoint repeats steps
        except BaseException:
            self._run = None
            self.abandon()
            raise

    def close(self) -> None:
        if self._run is not None:
            try:
                self._run.finish()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Ends W&B's process. Otherwise the janitor would kill it with the run's other processes, and W&B's exit hook
        would print a traceback."""
        import wandb

        wandb.teardown()

    def _begin(self) -> Any:
        import wandb

        logged_in = bool(wandb.api.api_key)
        if not logged_in:
            do = f"`wandb sync {self._directory}/wandb/offline-run-*` uploads it"
            logger.warning("no W&B login: recording offline; %s", do)
        run = wandb.init(
            **self._options,
            resume="allow",
            dir=str(self._directory),
            mode=None if logged_in else "offline",
            settings=wandb.Settings(console="off", silent=True),
        )
        run.define_metric("*", step_metric="step")
        return run
