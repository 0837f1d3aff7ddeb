"""`asyncrl-top RUN_DIR`: watches a run in a terminal, also over ssh. It reads the run's files, and touches nothing.

Exit codes: 2 bad input, 0 otherwise: the run has ended, or Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.commands import refuse
from asyncrl.errors import AsyncRLError
from asyncrl.json_records import read_json
from asyncrl.observability.progress import duration, step_table
from asyncrl.ranges import Whole
from asyncrl.report.run_files import event_of, metrics_of
from asyncrl.types.events import FAULTS, RunEnded, RunFaulted, RunStarted
from asyncrl.types.metrics import Metric

SHOWN_FAULTS = 5
SHORTEST_S = 0.05
"""Shortest pause between two looks."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="asyncrl-top", description=str(__doc__).split("\n")[0])
    parser.add_argument("run", metavar="RUN_DIR", type=Path)
    parser.add_argument("--once", action="store_true", help="print the newest step and end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    options = parser.parse_args(argv)
    console = Console()
    try:
        watched = Watched(options.run)
        if options.once:
            watched.look()
            console.print(watched.view(time.time()))
        else:
            _watch(watched, console, max(SHORTEST_S, options.interval))
    except AsyncRLError as error:
        return refuse(f"asyncrl-top: {error}", error)
    except KeyboardInterrupt:
        pass
    return 0


def _watch(watched: Watched, console: Console, interval_s: float) -> None:
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            watched.look()
            live.update(watched.view(time.time()), refresh=True)
            if watched.ended:
                break
            time.sleep(interval_s)
    if console.is_terminal:
        console.print(watched.view(time.time()))  # the screen of the live view is gone


class Watched:
    """The state of one run, as read from its files so far. Owns the read positions."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if there is no run."""
        directory = RunDirectory(path)
        asked = f"watch {path}"
        self._name = directory.read_setting(asked, "name", str)
        self._max_steps = directory.read_setting(asked, "recipe.run.max_steps", Whole)
        self._metrics, self._events = _Tail(directory.metrics, metrics_of), _Tail(directory.events, event_of)
        self._record: Mapping[str, float | None] = {}
        self._rewards: deque[float] = deque(maxlen=30)
        self._ends: deque[tuple[float, float]] = deque(maxlen=21)
        """Step and `time_s` of the newest records."""
        self._accuracy: float | None = None
        self._faults: deque[str] = deque(maxlen=SHOWN_FAULTS)
        self._seen_s = 0.0
        self.ended = ""
        """How the run ended; empty while it runs."""

    def look(self) -> None:
        """Reads new lines of metrics and events."""
        for record in self._metrics.new():
            self._record = record
            self._seen_s = time.time()
            self._accuracy = record.get(Metric.EVAL_ACCURACY, self._accuracy)
            self._rewards.append(record.get(Metric.REWARD_MEAN) or 0.0)
            if self._ends and record[Metric.STEP] <= self._ends[-1][0]:
                self._ends.clear()  # the run went back to a checkpoint
            self._ends.append((record[Metric.STEP], record.get(Metric.TIME) or 0.0))
        for event in self._events.new():
            kind = event.get("event")
            if kind == RunStarted.kind:
                self.ended = ""
            elif kind in (RunEnded.kind, RunFaulted.kind):
                self.ended = str(event.get("outcome") or event.get("error"))
            if kind in FAULTS:
                at = time.strftime("%H:%M:%S", time.localtime(event.get("time_s", 0.0)))
                error = str(event.get("error", "")).strip().splitlines()[-1:]
                self._faults.append(" ".join([at, str(kind), str(event.get("replica", "")), *error])[:200])

    def view(self, now_s: float) -> RenderableType:
        if not self._record:
            return Text(f"{self._name}: no optimizer step yet; see log.txt")
        parts: list[RenderableType] = [Text(self._head(now_s), "bold")]
        parts.append(step_table(self._record, self._accuracy, self._rewards))
        parts += [Text(fault, "red") for fault in self._faults]
        return Group(*parts)

    def _head(self, now_s: float) -> str:
        step = int(self._record[Metric.STEP] or 0)
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        step_s = (ended - began) / (last - first) if last > first else 0.0
        left = f", {duration((self._max_steps - step) * step_s)} left, {step_s:.2f} s a step" if step_s else ""
        state = self.ended or f"last step {now_s - self._seen_s:.0f} s ago"
        return f"{self._name}  step {step} of {self._max_steps}{left}  ({state})"


class _Tail:
    """New lines of a file of JSON lines; an incomplete last line waits for the next look."""

    def __init__(self, path: Path, read: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """`read`: checks the object of a line. Raises ValueError: it is no record."""
        self._path, self._read, self._at = path, read, 0

    def new(self) -> Iterator[Mapping[str, Any]]:
        if not self._path.is_file():
            return
        if self._path.stat().st_size < self._at:
            self._at = 0  # a resumed run has truncated the file
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                try:
                    value = read_json(line)
                    record = self._read(value if isinstance(value, dict) else {})
                except ValueError:
                    continue  # torn by a crash
                yield record


if __name__ == "__main__":
    sys.exit(main())
