"""Shows the progress of a run: a live table on a terminal, otherwise one line per step."""

from __future__ import annotations

import logging
import time
from collections import deque

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from asyncrl.observability.terminal_view import step_table
from asyncrl.types.metrics import Metric, Record

logger = logging.getLogger(__name__)


class ProgressView:
    """Owns the live table, if any. `live`: draw a table that is updated in place; otherwise log one line per step."""

    def __init__(self, console: Console, *, max_steps: int, live: bool) -> None:
        self._max_steps = max_steps
        self._ends: deque[float] = deque([time.monotonic()], maxlen=21)
        self._rewards: deque[float] = deque(maxlen=30)
        self._accuracy: float | None = None
        self._bar = Progress(
            TextColumn("step"), BarColumn(bar_width=40), MofNCompleteColumn(), TextColumn("{task.fields[eta]}")
        )
        self._task = self._bar.add_task("step", total=max_steps, eta="")
        self._live = Live(self._bar, console=console, refresh_per_second=4) if live else None
        if self._live is not None:
            self._live.start()

    def evaluated(self, accuracy: float) -> None:
        self._accuracy = accuracy

    def stepped(self, record: Record) -> None:
        self._ends.append(time.monotonic())
        self._accuracy = record.get(Metric.EVAL_ACCURACY, self._accuracy)
        self._rewards.append(record[Metric.REWARD_MEAN])
        step = int(record[Metric.STEP])
        step_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        eta = f"{duration((self._max_steps - step) * step_s)} left, {step_s:.2f} s a step"
        accuracy = "-" if self._accuracy is None else f"{self._accuracy:.3f}"
        logger.info(
            "step %d/%d  reward %.3f  accuracy %s  lag %.2f (max %d)  queue running %d ready %d trained %d  "
            "rollout %.0f tok/s  train %.0f tok/s  %s",
            *(step, self._max_steps, record[Metric.REWARD_MEAN], accuracy),
            *(record[Metric.LAG_MEAN], record[Metric.LAG_MAX]),
            *(record[Metric.QUEUE_RUNNING], record[Metric.QUEUE_READY], record[Metric.QUEUE_TRAINED]),
            *(record[Metric.ROLLOUT_SPEED], record[Metric.TRAIN_SPEED], eta),
        )
        if self._live is not None:
            self._bar.update(self._task, completed=step, eta=eta)
            self._live.update(Group(self._bar, step_table(record, self._accuracy, self._rewards)))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{rest:02d}s"
