"""Compares `metrics.jsonl` with the events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.audit.audit_report import COUNTS, ENDS, STATES, Finding
from asyncrl.audit.log import parsed
from asyncrl.audit.replay import Audit
from asyncrl.types.metrics import QUEUE_METRICS, Metric

METRICS = "metrics.jsonl"


def check_metrics(path: Path, audit: Audit) -> Iterator[Finding]:
    """Checks one line per completed step, in order, each in balance. A killed process may have torn or omitted the last
    line."""
    if audit.is_lost:
        return
    try:
        with path.open("rb") as file:
            lines = file.readlines()
    except OSError:
        lines = []
    complete = audit.outcome in ("finished", "interrupted") and not audit.unsure
    written = 0
    for number, raw in enumerate(lines, 1):
        record = parsed(raw) if raw.endswith(b"\n") else None
        if record is None:
            if complete or number < len(lines):
                yield Finding(METRICS, number, "no JSON")
            continue
        written += 1
        try:
            for text in (*_wrong_counts(record, written, audit), *_wrong_evaluations(record, written, audit)):
                yield Finding(METRICS, number, text)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            yield Finding(METRICS, number, f"malformed line ({type(error).__name__}: {error})")
    late = not complete and audit.goes_back
    if (written > audit.step and not late) or written < audit.step - (0 if complete else 1):
        yield Finding(METRICS, 0, f"{written} steps; the events have {audit.step}")


def _wrong_counts(record: Mapping[str, Any], step: int, audit: Audit) -> Iterator[str]:
    limits = audit.limits
    if record[Metric.STEP] != step:
        yield f"step {record['step']} where step {step} was expected"
    counts = {name: record[QUEUE_METRICS[name]] for name in COUNTS}
    if not all(type(count) is int and count >= 0 for count in counts.values()):
        yield f"the counts of the queue are no counts: {counts}"
    elif counts["admitted"] != sum(counts[name] for name in (*STATES, *ENDS)):
        yield f"the queue does not balance: {counts}"
    elif counts["trained"] != step * limits.groups_per_step:
        yield f"{counts['trained']} groups trained after step {step}, not {step * limits.groups_per_step}"
    if Metric.SANDBOXES.of("live") in record:
        live, opened, closed = (record[Metric.SANDBOXES.of(state)] for state in ("live", "opened", "closed"))
        if not 0 <= live == opened - closed <= limits.sandboxes:
            yield f"{live} sandboxes live, {opened} opened, {closed} closed; at most {limits.sandboxes} may live"
    lag, (bound, announced) = record[Metric.LAG_MAX], audit.lags.get(step - 1, (limits.max_lag, None))
    if not 0 <= lag <= min(limits.max_lag, bound):
        yield f"lag {lag}; by the events at most {min(limits.max_lag, bound)}"
    elif announced is not None and lag != announced:
        yield f"lag {lag}; the `step` event has {announced}"


def _wrong_evaluations(record: Mapping[str, Any], step: int, audit: Audit) -> Iterator[str]:
    """Compares the evaluations on this line with the events; the line of step 1 has the evaluation before training."""
    if step > audit.step:
        return  # undone: its events may be undone too
    expected, asked = _expected(audit, step), tuple(_ASKED)
    if step == 1 and Metric.EVAL_ACCURACY in (before := _expected(audit, 0)):
        expected[Metric.EVAL_INITIAL_ACCURACY] = before[Metric.EVAL_ACCURACY]
    for key in sorted({*expected, *(key for key in record if key.startswith(asked))}):
        found, events = record.get(key), expected.get(key)
        if found != events and (found is None or events is None or not math.isclose(found, events)):
            yield f"{key} is {found}; by the events it is {events}"
    failed = audit.driver.failed
    if record.get(Metric.EVAL_FAILED) and not (failed.get(step) or (step == 1 and failed.get(0))):
        yield "an evaluation was given up; no event tells of it"


_ASKED = (Metric.EVAL_ACCURACY, Metric.EVAL_INITIAL_ACCURACY, Metric.EVAL_PASS, Metric.EVAL_MEAN, Metric.EVAL_VERSION)


def _expected(audit: Audit, told: int) -> dict[str, float]:
    """The metrics of the evaluations reported at the end of this step; a later evaluation replaces an earlier one.
    Without answers to every set there is no mean."""
    values: dict[str, float] = {}
    for at, events in sorted(audit.driver.evaluated.get(told, {}).items()):
        if at not in audit.driver.failed.get(told, ()):
            values[Metric.EVAL_ACCURACY] = sum(event.accuracy for event in events.values()) / len(events)
        values[Metric.EVAL_VERSION] = max(event.version for event in events.values())
        for name, event in events.items():
            values[Metric.EVAL_ACCURACY_OF.of(name)] = event.accuracy
            if event.samples > 1:
                values[Metric.EVAL_MEAN.of(f"{event.samples}/{name}")] = event.accuracy
            values |= {Metric.EVAL_PASS.of(f"{k}/{name}"): value for k, value in event.pass_at.items()}
    return values
