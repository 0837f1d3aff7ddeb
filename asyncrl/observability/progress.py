"""Shows the progress of a run: a live table on a terminal, otherwise one line per step. `asyncrl-top` draws the same
table of any run."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from asyncrl.types.guard import LAG_BUCKETS
from asyncrl.types.metrics import QUEUE_METRICS, Metric, Record

logger = logging.getLogger(__name__)

BAR = 40
"""Characters of a bar."""
_STATES = ("admitted", "running", "ready", "leased", "trained", "filtered", "expired", "failed")
_STYLES = ("blue", "yellow", "red", "magenta", "cyan", "green", "white", "bright_black")
_SPARKS = "▁▂▃▄▅▆▇█"


class ProgressView:
    """Owns the live table, if any. `live`: draw a table that is updated in place; otherwise log one line per step."""

    def __init__(self, console: Console, *, max_steps: int, live: bool) -> None:
        self._max_steps = max_steps
        self._ends: deque[float] = deque([time.monotonic()], maxlen=21)
        self._rewards: deque[float] = deque(maxlen=30)
        self._accuracy: float | None = None
        self._before: float | None = None
        """Accuracy before training."""
        self._bar = Progress(
            TextColumn("step"), BarColumn(bar_width=40), MofNCompleteColumn(), TextColumn("{task.fields[eta]}")
        )
        self._task = self._bar.add_task("step", total=max_steps, eta="")
        self._live = Live(self._bar, console=console, refresh_per_second=4) if live else None
        if self._live is not None:
            self._live.start()

    def evaluated(self, accuracy: float) -> None:
        self._before = accuracy if self._before is None else self._before
        self._accuracy = accuracy

    def stepped(self, record: Record) -> None:
        self._ends.append(time.monotonic())
        self._accuracy = record.get(Metric.EVAL_ACCURACY, self._accuracy)
        self._rewards.append(record[Metric.REWARD_MEAN])
        step = int(record[Metric.STEP])
        step_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        eta = f"{duration((self._max_steps - step) * step_s)} left, {step_s:.2f} s a step"
        accuracy = "-" if self._accuracy is None else f"{self._accuracy:.3f}"
        if self._before is not None:
            accuracy = f"{self._before:.3f} -> {accuracy}"
        logger.info(
            "step %d/%d  reward %.3f  accuracy %s  cut off %.0f%%  entropy %.2f  lag %.2f (max %d)  queue running %d "
            "ready %d trained %d  rollout %.0f tok/s  train %.0f tok/s  %s",
            *(step, self._max_steps, record[Metric.REWARD_MEAN], accuracy),
            *(100 * record.get(Metric.TRUNCATED, 0.0), record.get(Metric.ENTROPY, 0.0)),
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


def step_table(record: Mapping[str, float | None], accuracy: float | None, rewards: Sequence[float] = ()) -> Table:
    """
    Args:
        record: a line of `metrics.jsonl`.
        rewards: mean rewards of the steps so far, oldest first.
    """

    def of(metric: Metric | str) -> float:
        return record.get(metric) or 0.0

    known = "-" if accuracy is None else f"{accuracy:.3f}"
    table = Table.grid(padding=(0, 2))
    rows: dict[str, str | Text] = {
        "learning": f"reward {of(Metric.REWARD_MEAN):.3f} {_sparks(rewards)}   held-out accuracy {known}   "
        f"loss {of(Metric.LOSS):+.4f}   grad norm {of(Metric.GRAD_NORM):.3f}",
        "off-policy": f"ratio {of(Metric.RATIO_MEAN):.3f}   clipped {of(Metric.CLIPPED):.1%}   "
        f"effective samples {of(Metric.EFFECTIVE_SAMPLES):.0%}   KL {of(Metric.KL_BEHAVIOR):.4f}",
        "staleness": f"lag mean {of(Metric.LAG_MEAN):.2f} max {of(Metric.LAG_MAX):.0f}   "
        f"in flight {of(Metric.LAG_IN_FLIGHT):.2f} in queue {of(Metric.LAG_IN_QUEUE):.2f}   "
        f"slots used {of(Metric.SLOTS):.0%}",
        "tokens by lag": _bar([(bucket, of(Metric.LAG_TOKENS.of(bucket))) for bucket in LAG_BUCKETS]),
        "queue": "   ".join(f"{name} {of(QUEUE_METRICS[name]):.0f}" for name in _STATES),
        "speed": f"rollout {of(Metric.ROLLOUT_SPEED):.0f} tok/s   train {of(Metric.TRAIN_SPEED):.0f} tok/s   "
        f"publish {1000 * of(Metric.PUBLISH_TIME):.0f} ms",
        "trainer's time": _bar(_causes("trainer_time", record)),
        "replicas' time": _bar(_causes("replica_time", record)),
    }
    for name, text in rows.items():
        table.add_row(f"[bold]{name}", text)
    return table


def _causes(group: str, record: Mapping[str, float | None]) -> list[tuple[str, float]]:
    return [(m.partition("/")[2].replace("_", " "), record.get(m) or 0.0) for m in Metric if m.group == group]


def _bar(shares: Sequence[tuple[str, float]]) -> Text:
    """A bar of shares that add up to 1, and their names, largest first."""
    text, drawn, total = Text(), 0, 0.0
    named = [(name, share, _STYLES[i % len(_STYLES)]) for i, (name, share) in enumerate(shares)]
    for _, share, style in named:
        total += share
        width = round(BAR * min(1.0, total)) - drawn
        drawn += width
        text.append("█" * width, style)
    text.append(" " * (BAR - drawn + 1))
    for name, share, style in sorted(named, key=lambda one: -one[1]):
        if share >= 0.005:
            text.append(f" {name} {share:.0%}", style)
    return text


def _sparks(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    return "".join(_SPARKS[int((value - low) / ((high - low) or 1.0) * (len(_SPARKS) - 1))] for value in values)
