"""Reads the files of a run, also during the run or after a crash."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.errors import ConfigError, explain
from asyncrl.types.metrics import Metric

Line = Mapping[str, float | None]
"""The metrics of one optimizer step; None: not finite."""
MAX_SAMPLES = 200
"""Number of newest trajectories that are read."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The content of one run directory.

    Attributes:
        settings: key of the recipe -> value, as resolved.
        metrics: one mapping per optimizer step, in order of the steps.
        events: as in `events.jsonl`, in the order of the file.
        samples: the newest trajectories, as in `samples.jsonl`.
        faults: names of the directories with evidence of failures.
    """

    name: str
    directory: Path
    settings: Mapping[str, Any]
    metrics: tuple[Line, ...]
    events: tuple[Mapping[str, Any], ...]
    samples: tuple[Mapping[str, Any], ...]
    faults: tuple[str, ...]

    def series(self, key: str) -> list[float | None]:
        """The values of a metric, one per line; None if the line lacks it or it was not finite."""
        return [line.get(key) for line in self.metrics]

    def of_kind(self, *kinds: str) -> list[Mapping[str, Any]]:
        """The events of these kinds."""
        return [event for event in self.events if event.get("event") in kinds]


def read_run(path: Path) -> RunFiles:
    """Raises ConfigError if there is no run, or it has not completed a step."""
    directory = RunDirectory(path)
    config = directory.read_config(f"the files of the run {path}")
    # If a step has several lines, the last one counts.
    by_step = {line[Metric.STEP]: line for line in _lines(directory.metrics) if Metric.STEP in line}
    if not by_step:
        found = "no optimizer step is complete: metrics.jsonl has no line"
        raise ConfigError(explain(f"the files of the run {path}", found, "wait for the first step, or read log.txt"))
    return RunFiles(
        name=str(config.get("name", path.name)),
        directory=directory.path,
        settings=dict(_flat(config.get("recipe", {})) | _flat(config.get("resolved", {}), "resolved.")),
        metrics=tuple(by_step[step] for step in sorted(by_step)),
        events=tuple(_lines(directory.events)),
        samples=tuple(list(_lines(directory.samples))[-MAX_SAMPLES:]),
        faults=tuple(sorted(p.name for p in directory.faults.iterdir())) if directory.faults.is_dir() else (),
    )


def read_spans(run: RunFiles) -> Iterator[dict[str, Any]]:
    """The lines of `spans.jsonl`; none if no group was recorded."""
    return _lines(RunDirectory(run.directory).spans)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines. Skips an incomplete line: the run may be writing it, or a crash tore it."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            flat |= _flat(inner, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = inner
    return flat
