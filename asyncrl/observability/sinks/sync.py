"""Brings a sink up to date with `metrics.jsonl`, after a crash or from a machine without a network."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, explain
from asyncrl.json_records import from_plain, read_json
from asyncrl.observability.sinks.tensorboard import TensorBoardSink
from asyncrl.observability.sinks.wandb import WandbSink, finite, logged_in
from asyncrl.ranges import Whole
from asyncrl.types.metrics import Metric


def sync_wandb(directory: Path, name: str, project: str, written: Mapping[str, Any]) -> tuple[int, int, str]:
    """Sends the records that W&B's server lacks, as the same run.

    Args:
        written: the recipe without secrets.

    Returns (records sent, records in total, the run's address).

    Raises:
        ConfigError: nobody is logged in; W&B rejects the name of the project or run.
        wandb.errors.Error: the server refuses.
    """
    import wandb

    if not (online := logged_in()) or wandb.Settings().mode == "offline":
        found = "W&B is offline here (WANDB_MODE)" if online else "nobody is logged in to W&B on this machine"
        do = "`wandb login`, here or on a machine with a network that has a copy of the directory"
        raise ConfigError(explain(f"send {directory} to W&B", found, do))
    records = read_records(directory / "metrics.jsonl")
    sink = WandbSink(directory, name, project, written)
    try:
        # A step that was trained again has a new `time_s`: it is sent again.
        there = sink.steps_there()
        missing = [r for r in records if there.get(int(r[Metric.STEP])) != r[Metric.TIME]]
        for record in missing:
            sink.write(int(record[Metric.STEP]), record)
        address = sink.run().url
    finally:
        sink.close()
    return len(missing), len(records), address


def rewrite_tensorboard(directory: Path) -> int:
    """Rebuilds `<run>/tensorboard` from all records; returns their number. Raises ConfigError."""
    records = read_records(directory / "metrics.jsonl")
    # Written next to the old files, which stay until the new ones are complete.
    made = directory / ".tensorboard.new"
    shutil.rmtree(made, ignore_errors=True)
    sink = TensorBoardSink(made)
    for record in records:
        sink.write(int(record[Metric.STEP]), record)
    sink.close()
    shutil.rmtree(directory / "tensorboard", ignore_errors=True)
    made.rename(directory / "tensorboard")
    return len(records)


def read_records(path: Path) -> list[dict[str, float]]:
    """The records of a run by step; of a step that was trained again, the last. Raises ConfigError if there are
    none."""
    by_step: dict[int, dict[str, float]] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError):  # torn by a crash
            record = from_plain(Mapping[str, float | None], read_json(line))
            by_step[from_plain(Whole, record.get(Metric.STEP))] = finite(record)
    if not by_step:
        found = "no record of an optimizer step there" if path.is_file() else "no such file"
        raise ConfigError(explain(f"the metrics in {path}", found, "name the directory of a run, as runs/quickstart"))
    return [by_step[step] for step in sorted(by_step)]
