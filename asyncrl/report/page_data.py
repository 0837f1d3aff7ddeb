"""The data of the report's page, as plain JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from asyncrl.observability.charts import CHARTS, SECTIONS
from asyncrl.report.findings import Diagnosis, findings, helps_most
from asyncrl.report.lifetimes import Lifetime, lifetimes
from asyncrl.report.run_files import RunFiles
from asyncrl.types.events import (
    ENVELOPE,
    FAULTS,
    CheckpointSaved,
    GroupChanged,
    RunEnded,
    RunFaulted,
    SnapshotTaken,
    StepTrained,
    WeightsPublished,
)
from asyncrl.types.metrics import Metric, metric_of

EXCERPT_STEPS = 30
EXCERPT_GROUPS = 600
MAX_TOKENS = 4096
"""Tokens of a trajectory that the page shows."""
MAX_EVENTS = 400
_PLAIN = tuple(event.kind for event in (GroupChanged, StepTrained, WeightsPublished, SnapshotTaken, CheckpointSaved))


def page_data(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Everything that the page shows of these runs; the first one is shown in full."""
    metrics = {key: metric for chart in CHARTS for key in chart.keys if (metric := metric_of(key))}
    return {
        "sections": [
            {"title": title, "charts": [asdict(chart) for chart in charts]} for title, charts in SECTIONS.items()
        ],
        "declared": {key: {"unit": metric.unit, "meaning": metric.meaning} for key, metric in metrics.items()},
        "runs": [_run(run) for run in runs],
        "differences": _differences(runs),
    }


def _run(run: RunFiles) -> dict[str, Any]:
    lives = lifetimes(run.events)
    found = findings(run, lives)
    return {
        "name": run.name,
        "directory": str(run.directory),
        "summary": _summary(run, found),
        "helps_most": helps_most(run),
        "findings": [asdict(finding) | {"metrics": [str(m) for m in finding.metrics]} for finding in found],
        "steps": [int(line[Metric.STEP] or 0) for line in run.metrics],
        "metrics": _columns(run),
        "timeline": _timeline(run, lives),
        "samples": [_sample(sample) for sample in run.samples],
        "images": dict(run.images),
        "events": _notable(run),
        "faults": list(run.faults),
        "settings": {key: _short(value) for key, value in sorted(run.settings.items())},
    }


def _summary(run: RunFiles, found: Sequence[Diagnosis]) -> list[list[str]]:
    last = run.metrics[-1]
    accuracy = [v for v in run.series(Metric.EVAL_ACCURACY) if v is not None]
    before = next((v for v in run.series(Metric.EVAL_INITIAL_ACCURACY) if v is not None), None)
    change = "" if before is None else f"{before:.3f} -> "
    ended = run.of_kind(RunEnded.kind, RunFaulted.kind)
    outcome = "in progress, or killed" if not ended else str(ended[-1].get("outcome", ended[-1].get("error", "")))
    bound = run.settings.get("resolved.max_lag", run.settings.get("staleness.max_lag"))
    return [
        ["outcome", outcome],
        ["steps", f"{last[Metric.STEP]:.0f} of {run.settings.get('run.max_steps', '?')}"],
        ["time", f"{last.get(Metric.TIME) or 0:.0f} s"],
        ["reward", f"{last.get(Metric.REWARD_MEAN) or 0:.3f}"],
        ["accuracy", f"{change}{accuracy[-1]:.3f} (best {max(accuracy):.3f})" if accuracy else "not evaluated"],
        ["largest lag", f"{max(v or 0 for v in run.series(Metric.LAG_MAX)):.0f} of {bound} allowed"],
        ["groups trained", f"{last.get(Metric.QUEUE_TRAINED) or 0:.0f}"],
        ["findings", str(len(found))],
    ]


def _columns(run: RunFiles) -> dict[str, list[float | None]]:
    """Each metric of the run, rounded to five digits: more is invisible, and the file stays small."""
    keys = sorted({key for line in run.metrics for key in line} - {str(Metric.STEP)})
    columns = {}
    for key in filter(metric_of, keys):
        values = [None if value is None else float(f"{value:.5g}") for value in run.series(key)]
        if any(value is not None for value in values):
            columns[key] = values
    return columns


def _timeline(run: RunFiles, lives: Sequence[Lifetime]) -> dict[str, Any]:
    """The last steps as spans `[lane, start, stop, text]`, in seconds since the first of them."""
    steps = run.of_kind(StepTrained.kind)[-EXCERPT_STEPS:]
    if not steps:
        return {"spans": [], "groups": []}
    train_s = {line[Metric.STEP]: line.get(Metric.TRAIN_TIME) or 0.0 for line in run.metrics}
    spans = [["train", e["time_s"] - train_s.get(e["step"], 0.0), e["time_s"], f"step {e['step']}"] for e in steps]
    began, ended = spans[0][1], steps[-1]["time_s"] + 1.0
    # Events carry their end and duration: the spans extend backwards.
    for event in run.events:
        now, kind = event.get("time_s", 0.0), event.get("event")
        if not began <= now <= ended:
            continue
        if kind == WeightsPublished.kind:
            spans.append(["publish", now - event["publish_s"], now, f"publish of version {event['version']}"])
        elif kind == CheckpointSaved.kind:
            spans.append(["checkpoint", now - event["save_s"], now, f"checkpoint of step {event['step']}"])
        elif kind in FAULTS:
            spans.append(["fault", now - 0.05, now, f"{kind} {event.get('replica', event.get('process', ''))}"])
    # Every group that was alive during the excerpt.
    groups = [
        [life.ordinal, life.attempt]
        + [None if at is None else round(at - began, 3) for at in (life.admitted, life.ready, life.leased, life.ended)]
        + [life.end, life.lag]
        for life in lives
        if life.admitted is not None and life.admitted <= ended and (life.ended is None or life.ended >= began)
    ]
    return {
        "spans": [[lane, round(a - began, 3), round(b - began, 3), text] for lane, a, b, text in spans],
        "groups": groups[-EXCERPT_GROUPS:],
    }


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    ends = sample.get("token_ends")
    return {
        key: sample.get(key)
        for key in ("ordinal", "attempt", "prompt", "response", "ground_truth", "reward", "segments", "branches")
    } | {
        "finish": sample.get("finish_reason"),
        "ends": None if ends is None else ends[:MAX_TOKENS],
        "logprobs": None if ends is None else sample.get("logprobs", [])[:MAX_TOKENS],
    }


def _notable(run: RunFiles) -> list[list[Any]]:
    """All events except changes of groups and steps: [seconds since the first event, kind, the rest as text]."""
    chosen = [event for event in run.events if event.get("event") not in _PLAIN][-MAX_EVENTS:]
    start = run.events[0].get("time_s", 0.0) if run.events else 0.0
    rows = []
    for event in chosen:
        rest = ", ".join(f"{key}={_short(value)}" for key, value in event.items() if key not in ENVELOPE)
        rows.append([round(event.get("time_s", start) - start, 2), event.get("event", ""), rest])
    return rows


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 300 else text[:297] + "..."


def _differences(runs: Sequence[RunFiles]) -> list[list[str]]:
    """[key, value in each run] of the settings that differ between runs."""
    keys = sorted({key for run in runs for key in run.settings})
    rows = [[key, *(_short(run.settings.get(key, "")) for run in runs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
