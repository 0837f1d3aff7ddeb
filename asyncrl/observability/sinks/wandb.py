from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, explain
from asyncrl.observability.sinks.wandb_charts import WandbCharts
from asyncrl.types.metrics import Metric, Record

logger = logging.getLogger(__name__)


class WandbSink:
    """A Weights & Biases run; without a login it is recorded offline below `<run>/wandb`. The first record starts it;
    after a failure the next record restarts it as the same run."""

    def __init__(self, directory: Path, name: str, project: str, written: Mapping[str, Any]) -> None:
        """
        Args:
            directory: of the run.
            written: the recipe without secrets.

        Raises ConfigError if W&B rejects the name of the project or run.
        """
        import wandb

        self._id_file = directory / "wandb" / "run_id"
        try:
            wandb.Settings(project=project, run_name=name, run_id=name)
        except Exception as error:
            asked = f"observability.sinks=[wandb] with observability.wandb_project={project} and run.name={name}"
            raise ConfigError(explain(asked, str(error), "give them other names")) from error
        self._directory = directory
        self._options = {"project": project, "name": name, "config": dict(written)}
        self._charts = WandbCharts(directory / "samples.jsonl")
        self._run: Any = None
        self._told = False

    def write(self, step: int, record: Record) -> None:
        try:
            # Logged by its own "step": a run that goes back to a checkpoint repeats steps.
            self.run().log({**record, **self._charts.histogram(record)})
        except BaseException:
            self._run = None
            self.abandon()
            raise
        self._draw(self._charts.due())

    def close(self) -> None:
        if self._run is not None:
            try:
                self._draw(self._charts.due(last=True))
                self._run.finish()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Ends W&B's process. Otherwise the janitor would kill it with the run's other processes, and W&B's exit hook
        would print a traceback."""
        import wandb

        wandb.teardown()

    def _draw(self, charts: Mapping[str, Any]) -> None:
        """Logs charts and tables. W&B stores them separately: if it refuses them, the record is still kept."""
        try:
            if charts:
                self._run.log(dict(charts))
        except Exception as error:  # noqa: BLE001 - any error of W&B; only the first is a warning
            level = logging.DEBUG if self._told else logging.WARNING
            logger.log(level, "W&B does not take charts and tables: %s: %s", type(error).__name__, error)
            self._told = True

    def run(self) -> Any:
        """The W&B run, started or resumed on the first call."""
        if self._run is not None:
            return self._run
        import wandb
        import wandb.util

        # With pandas installed, W&B would import it to check whether each chart is a data frame: 80 MB.
        wandb.util.pd_available = False
        if not (online := logged_in()):
            do = f"`asyncrl-dashboard sync {self._directory}` uploads it"
            logger.warning("no W&B login: recording offline; %s", do)
        run = wandb.init(
            **self._options,
            id=self._run_id(),
            resume="allow",
            dir=str(self._directory),
            mode=None if online else "offline",
            settings=wandb.Settings(console="off", silent=True),
        )
        run.define_metric("*", step_metric=str(Metric.STEP))
        for metric in Metric:
            best = ("max",) if metric in (Metric.REWARD_MEAN, Metric.EVAL_ACCURACY, Metric.EVAL_ACCURACY_OF) else ()
            summary = dict.fromkeys(("last", metric.reduction, *best))
            name = f"{metric}*" if metric.is_family else str(metric)
            run.define_metric(name, step_metric=str(Metric.STEP), summary=",".join(summary))
        self._run = run
        return run

    def steps_there(self) -> dict[int, float]:
        """Step -> `time_s` of its newest record on W&B's server, which tells repeated trainings apart."""
        import wandb

        run = self.run()
        found: dict[int, float] = {}
        if run.resumed:
            keys = [str(Metric.STEP), str(Metric.TIME)]
            for row in wandb.Api().run(f"{run.entity}/{run.project}/{run.id}").scan_history(keys=keys, use_cache=False):
                found[int(row[Metric.STEP])] = float(row[Metric.TIME])
        return found

    def _run_id(self) -> str:
        """The run's id, stored in the run directory and copied with it."""
        if not self._id_file.exists():
            self._id_file.parent.mkdir(exist_ok=True)
            self._id_file.write_text(f"{self._options['name']}-{secrets.token_hex(4)}")
        return self._id_file.read_text().strip()


def logged_in() -> bool:
    import wandb

    return wandb.login(prompt=False, verify=False)


def finite(record: Mapping[str, float | None]) -> dict[str, float]:
    """A line of `metrics.jsonl` with null replaced by NaN."""
    return {name: math.nan if value is None else value for name, value in record.items()}
