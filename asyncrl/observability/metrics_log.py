"""Writes the metrics of each optimizer step to `metrics.jsonl` and the sinks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from asyncrl.json_records import append_line, replace_file, write_json
from asyncrl.observability.sinks.sink_thread import SinkFeed
from asyncrl.types.metrics import FAMILIES, REQUIRED, Metric, Record

_KNOWN = frozenset(Metric)


class MetricsLog:
    """Writes one object per optimizer step to `path`, and to every sink.

    A non-finite value is written as null: JSON cannot express it.
    """

    def __init__(self, path: Path, sinks: Sequence[SinkFeed] = ()) -> None:
        self._path = path
        self._sinks = sinks

    def write(self, record: Record) -> None:
        """Adds `sinks/failed_records`.

        Raises ValueError naming undeclared metrics or missing required ones; StorageError."""
        record = {str(name): value for name, value in record.items()}
        record[Metric.SINKS_FAILED] = sum(sink.failed for sink in self._sinks)
        unknown = [name for name in record if name not in _KNOWN and not name.startswith(FAMILIES)]
        missing = sorted(REQUIRED - set(record))
        if unknown or missing:
            raise ValueError(f"metrics not declared: {unknown}; missing: {missing}")
        append_line(self._path, write_json(record))
        for sink in self._sinks:
            sink.write(int(record[Metric.STEP]), record)

    def truncate_after(self, step: int) -> None:
        """Removes the lines of steps after `step`: the run continues there and trains them again."""
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_text().splitlines() if _step_of(line) <= step]
        replace_file(self._path, "".join(line + "\n" for line in kept).encode())

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _step_of(line: str) -> float:
    """Infinity for a line torn by a crash."""
    try:
        return json.loads(line)[Metric.STEP]
    except ValueError:
        return math.inf
