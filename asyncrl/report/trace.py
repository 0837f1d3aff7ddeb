"""The timeline of a run in Chrome's trace format, for Perfetto and chrome://tracing. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from asyncrl.report.lifetimes import Lifetime, lifetimes
from asyncrl.report.run_files import RunFiles
from asyncrl.types.events import FAULTS, CheckpointSaved, SetEvaluated, StepTrained, WeightsPublished
from asyncrl.types.metrics import Metric

COUNTERS = (Metric.LAG_MEAN, Metric.QUEUE_RUNNING, Metric.QUEUE_READY, Metric.ROLLOUT_SPEED)
TRAINER, GROUPS, TRAJECTORIES, REPLICAS = 1, 2, 3, 10
"""Process ids in the trace; a replica has `REPLICAS` plus its id."""
_LANES = {"steps": 1, "publishes": 2, "checkpoints": 3, "evaluations": 4}
Trace = dict[str, Any]


def chrome_trace(run: RunFiles, recorded: Iterable[Mapping[str, Any]]) -> Trace:
    """Steps, publishes, checkpoints, evaluations, faults, every group, and the requests of the recorded groups.

    Args:
        recorded: the lines of spans.jsonl.
    """
    start = min((event["time_s"] for event in run.events if "time_s" in event), default=0.0)
    found = [_heading(TRAINER, "trainer"), _heading(GROUPS, "groups: generated, ready, in the step")]
    found += [_heading(TRAINER, name) | {"name": "thread_name", "tid": number} for name, number in _LANES.items()]
    found += _of_trainer(run, start)
    found += _of_groups(lifetimes(run.events), start)
    found += _of_trajectories(recorded, start)
    ended = {e["step"]: e["time_s"] for e in run.of_kind(StepTrained.kind)}
    for line in run.metrics:
        if (at := ended.get(line[Metric.STEP])) is not None:
            found += [_counter(str(key), at - start, line.get(key)) for key in COUNTERS]
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"run": run.name, "start_s": start}}


def _of_trainer(run: RunFiles, start: float) -> Iterator[Trace]:
    of_step = {line[Metric.STEP]: line for line in run.metrics}
    lengths: dict[str, tuple[str, Callable[[Mapping[str, Any]], float], str]] = {
        StepTrained.kind: ("steps", lambda e: (of_step.get(e["step"]) or {}).get(Metric.TRAIN_TIME) or 0.0, "step"),
        WeightsPublished.kind: ("publishes", lambda e: e["publish_s"], "version"),
        CheckpointSaved.kind: ("checkpoints", lambda e: e["save_s"], "step"),
    }
    for event in run.events:
        kind, now = event.get("event"), event.get("time_s", start) - start
        if kind in lengths:
            lane, seconds_of, number = lengths[kind]
            seconds = seconds_of(event)
            name = f"{lane.removesuffix('es' if lane == 'publishes' else 's')} {event[number]}"
            yield _span(TRAINER, _LANES[lane], name, now - seconds, now, {number: event[number]})
        elif kind == SetEvaluated.kind:
            took = (of_step.get(event["step"]) or {}).get(Metric.EVAL_TIME) or 0.0
            yield _span(TRAINER, _LANES["evaluations"], f"{event['name']}", now - took, now, {"step": event["step"]})
        elif kind in FAULTS:
            what = f"{kind} {event.get('replica', event.get('process', ''))}".strip()
            yield {"name": what, "ph": "i", "s": "g", "pid": TRAINER, "tid": 1, "ts": _us(now)}


def _of_groups(lives: Sequence[Lifetime], start: float) -> Iterator[Trace]:
    lanes = _Lanes()
    last = max((t for life in lives for t in (life.admitted, life.ready, life.ended) if t is not None), default=start)
    for life in sorted((life for life in lives if life.admitted is not None), key=lambda life: life.admitted or 0.0):
        assert life.admitted is not None
        stop = last if life.ended is None else life.ended
        lane = lanes.take(life.admitted, stop)
        named = f"group {life.ordinal}" + f" attempt {life.attempt}" * bool(life.attempt)
        end = {"end": life.end or "in progress"} | ({} if life.lag is None else {"lag": life.lag})
        bounds = (
            ("generated", life.admitted, life.ready),
            ("ready", life.ready, life.leased),
            ("in the step", life.leased, stop),
        )
        for what, begin, until in bounds:
            if begin is not None:
                yield _span(GROUPS, lane, f"{named} {what}", begin - start, (until or stop) - start, end)


def _of_trajectories(recorded: Iterable[Mapping[str, Any]], start: float) -> Iterator[Trace]:
    lanes, of_replicas = _Lanes(), {}
    groups = [(line, spans) for line in recorded for spans in line["trajectories"] if spans]
    if groups:
        yield _heading(TRAJECTORIES, "trajectories of some groups: requests and rewards")
    requests: list[tuple[float, float, str, Mapping[str, int]]] = []
    # One lane per trajectory, with its spans nested inside.
    for line, spans in sorted(groups, key=lambda group: min(span[1] for span in group[1])):
        lane = lanes.take(min(span[1] for span in spans), max(span[2] for span in spans))
        for kind, begin, stop, made in spans:
            name = f"group {line['ordinal']} {kind}" if kind == "trajectory" else kind
            yield _span(TRAJECTORIES, lane, name, begin - start, stop - start, made)
            if kind == "request":
                requests.append((begin, stop, f"group {line['ordinal']}", made))
    # The same requests again, by replica.
    for begin, stop, name, made in sorted(requests, key=lambda request: request[0]):
        replica = made["replica"]
        if replica not in of_replicas:
            of_replicas[replica] = _Lanes()
            yield _heading(REPLICAS + replica, f"replica {replica}: requests of some groups")
        lane = of_replicas[replica].take(begin, stop)
        yield _span(REPLICAS + replica, lane, name, begin - start, stop - start, {"tokens": made["tokens"]})


class _Lanes:
    """Assigns overlapping spans to different lanes. Spans must come in order of their begin."""

    def __init__(self) -> None:
        self._free: list[tuple[float, int]] = []

    def take(self, begin: float, stop: float) -> int:
        # Reuse the lane that became free first. Busy lanes stay on the heap, so its size numbers a new lane.
        if self._free and self._free[0][0] <= begin:
            _, lane = heapq.heappop(self._free)
        else:
            lane = len(self._free) + 1
        heapq.heappush(self._free, (stop, lane))
        return lane


def _span(pid: int, tid: int, name: str, begin: float, stop: float, args: Mapping[str, Any]) -> Trace:
    """`begin` and `stop` in seconds since the start of the run."""
    length = _us(max(0.0, stop - begin))
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": _us(begin), "dur": length, "args": dict(args)}


def _counter(name: str, at: float, value: float | None) -> Trace:
    return {"name": name, "ph": "C", "pid": TRAINER, "tid": 0, "ts": _us(at), "args": {"value": value or 0.0}}


def _heading(pid: int, name: str) -> Trace:
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
