"""Content of a W&B run besides scalars: a histogram of token lags per step, custom charts by lag, and tables of
trajectories."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.types.guard import LAG_BUCKETS, LAST_OF_BUCKET
from asyncrl.types.metrics import Metric, Record

EVERY_STEPS = 20
"""Interval at which charts and tables are sent, and once at the end."""
ROWS = 16
"""Newest trajectories of a table."""
EDGES = [0, *(last + 1 for last in LAST_OF_BUCKET), 2 * LAST_OF_BUCKET[-1] + 1]
"""Edges of the lag buckets."""
COLUMNS = ("ordinal", "attempt", "prompt", "response", "ground_truth", "reward", "finish_reason", "versions")


class WandbCharts:
    """Owns the sums over the run behind the custom charts, and the position in the file of samples."""

    def __init__(self, samples: Path) -> None:
        self._samples, self._read = samples, 0
        self._tokens: dict[str, float] = dict.fromkeys(LAG_BUCKETS, 0.0)
        self._weighed = defaultdict[tuple[Metric, str], float](float)
        """Family and bucket -> sum over the bucket's tokens."""
        self._steps, self._step = 0, 0.0

    def histogram(self, record: Record) -> dict[str, Any]:
        """The histogram to log with this record. Adds the record to the sums."""
        import wandb

        # Means by bucket are weighted by tokens, so that the sums can be divided at the end.
        shares = [record.get(Metric.LAG_TOKENS.of(bucket), 0.0) for bucket in LAG_BUCKETS]
        for bucket, share in zip(LAG_BUCKETS, shares, strict=True):
            tokens = share * record.get(Metric.TRAINED_TOKENS, 0.0)
            self._tokens[bucket] += tokens
            for family in (Metric.LAG_RATIO, Metric.LAG_KL):
                self._weighed[family, bucket] += tokens * record.get(family.of(bucket), 0.0)
        self._steps += 1
        self._step = record[Metric.STEP]
        counts = np.asarray(shares), np.asarray(EDGES)
        return {"staleness/lag_histogram": wandb.Histogram(np_histogram=counts)}

    def due(self, *, last: bool = False) -> dict[str, Any]:
        """Charts and tables if they are due, else empty. `last`: no more records come, so the others are due."""
        return self._summary() if (self._steps % EVERY_STEPS == 0) != last else {}

    def _summary(self) -> dict[str, Any]:
        found = {
            str(Metric.STEP): self._step,
            "charts/tokens_by_lag": _bars("Trained tokens by lag", "tokens", self._tokens),
        }
        for family, name, title in (
            (Metric.LAG_RATIO, "charts/ratio_by_lag", "Importance ratio by lag"),
            (Metric.LAG_KL, "charts/kl_by_lag", "Divergence from the behaviour policy by lag, nats"),
        ):
            means = {b: self._weighed[family, b] / tokens for b, tokens in self._tokens.items() if tokens}
            found[name] = _bars(title, "mean", means)
        if rows := self._new_samples():
            import wandb

            found["samples/trajectories"] = wandb.Table(columns=list(COLUMNS), data=rows)
        return found

    def _new_samples(self) -> list[Any]:
        """Rows of trajectories written since the last call, at most the newest `ROWS`."""
        if not self._samples.is_file():
            return []
        with self._samples.open("rb") as file:
            file.seek(self._read)
            lines = file.read().split(b"\n")
        self._read += sum(len(line) + 1 for line in lines[:-1])  # the last one is incomplete or empty
        return [_row(json.loads(line)) for line in lines[:-1][-ROWS:]]


def _row(sample: dict[str, Any]) -> list[Any]:
    versions = sorted({segment[2] for segment in sample["segments"] if segment[4] == "policy"})
    shown = sample | {"versions": " ".join(map(str, versions)), "ground_truth": str(sample["ground_truth"])}
    return [shown[column] for column in COLUMNS]


def _bars(title: str, what: str, values: Mapping[str, float]) -> Any:
    import wandb

    rows: list[Any] = [[bucket, value] for bucket, value in values.items()]
    table = wandb.Table(columns=["lag", what], data=rows)
    return wandb.plot.bar(table, "lag", what, title=title)
