"""Reads the files of a run, also during the run or after a crash."""

from __future__ import annotations

import base64
import io
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Lt

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.errors import ConfigError, explain
from asyncrl.json_records import from_plain, read_json
from asyncrl.ranges import Whole
from asyncrl.types.events import ENVELOPE, EVENTS
from asyncrl.types.metrics import Metric

T = TypeVar("T")

Line = Mapping[str, float | None]
"""The metrics of one optimizer step; None: not finite."""
MAX_SAMPLES = 200
"""Number of newest trajectories that are read."""
_SHOWN_PIXELS = 224
"""Longest side of an image on the page."""
MAX_DEPTH = 8
"""Sections in sections of a recipe that are told apart."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The content of one run directory.

    Attributes:
        settings: key of the recipe -> value, as resolved.
        metrics: one mapping per optimizer step, in order of the steps.
        events: as in `events.jsonl`, in the order of the file.
        samples: the newest trajectories, as in `samples.jsonl`.
        faults: names of the directories with evidence of failures.
        unread: file -> number of its lines that hold no record, and are left out.
        images: key of an image of the samples -> `data:image/png;base64,...`, made small.
    """

    name: str
    directory: Path
    settings: Mapping[str, Any]
    metrics: tuple[Line, ...]
    events: tuple[Mapping[str, Any], ...]
    samples: tuple[Mapping[str, Any], ...]
    faults: tuple[str, ...]
    unread: Mapping[str, int]
    images: Mapping[str, str] = field(default_factory=dict)

    def series(self, key: str) -> list[float | None]:
        """The values of a metric, one per line; None if the line lacks it or it was not finite."""
        return [line.get(key) for line in self.metrics]

    def of_kind(self, *kinds: str) -> list[Mapping[str, Any]]:
        """The events of these kinds."""
        return [event for event in self.events if event.get("event") in kinds]


def read_run(path: Path) -> RunFiles:
    """Raises ConfigError if there is no run, or it has not completed a step."""
    asked = f"the files of the run {path}"
    directory, unread = RunDirectory(path), Counter[str]()
    config = directory.read_config(asked)
    # If a step has several lines, the last one counts.
    by_step = {line[Metric.STEP] or 0: line for line in _lines(directory.metrics, metrics_of, unread)}
    if not by_step:
        found = "no optimizer step is complete: metrics.jsonl has no line of one"
        raise ConfigError(explain(asked, found, "wait for the first step, or read log.txt"))
    settings = dict(_flat(config.get("recipe")) | _flat(config.get("resolved"), "resolved."))
    samples = tuple(deque(_lines(directory.samples, _sample, unread), MAX_SAMPLES))
    return RunFiles(
        name=str(config.get("name", path.name)),
        directory=directory.path,
        settings=settings,
        metrics=tuple(by_step[step] for step in sorted(by_step)),
        events=tuple(_lines(directory.events, event_of, unread)),
        samples=samples,
        faults=tuple(sorted(p.name for p in directory.faults.iterdir())) if directory.faults.is_dir() else (),
        unread=unread,
        images=dict(_images(samples, settings.get("data.image_directory"))),
    )


def _images(samples: Sequence[Mapping[str, Any]], directory: Any) -> Iterator[tuple[str, str]]:
    """Those of these samples that are still in the directory."""
    if not isinstance(directory, str):
        return
    from asyncrl.types.images import IN_TEXT, ImageStore  # the page of a run of text needs no numpy

    texts = [sample.get(name) or "" for sample in samples for name in ("prompt", "response")]
    for key in sorted({key for text in texts for key in IN_TEXT.findall(text)})[:MAX_SAMPLES]:
        with suppress(OSError):
            (image,) = ImageStore(directory).open([key])
            image = image.copy()
            image.thumbnail((_SHOWN_PIXELS, _SHOWN_PIXELS))
            image.save(file := io.BytesIO(), "png")
            yield key, "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def read_spans(run: RunFiles) -> Iterator[Mapping[str, Any]]:
    """The lines of `spans.jsonl`; none if no group was recorded."""
    return _lines(RunDirectory(run.directory).spans, _spans, Counter())


# Each function returns the record of a line, or raises ValueError: a file may contain anything.


def metrics_of(value: Mapping[str, Any]) -> Line:
    from_plain(Whole, value.get(Metric.STEP))
    return from_plain(Mapping[str, float | None], value)


def event_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = EVENTS.get(str(value.get("event")))
    if kind is None:
        raise ValueError("no event of this version")
    from_plain(_Time, value.get("time_s"))
    from_plain(kind, {name: inner for name, inner in value.items() if name not in ENVELOPE})
    return value


def _sample(value: Mapping[str, Any]) -> Mapping[str, Any]:
    known = {field.name for field in fields(_Sample)}
    from_plain(_Sample, {name: inner for name, inner in value.items() if name in known})
    return value


def _spans(value: Mapping[str, Any]) -> Mapping[str, Any]:
    for trajectory in from_plain(_Spans, value).trajectories:
        if any(kind == "request" and not {"replica", "tokens"} <= made.keys() for kind, _, _, made in trajectory):
            raise ValueError("a request without its replica and tokens")
    return value


_Time = Annotated[float, Ge(0), Lt(1e12)]
_Span = tuple[str, _Time, _Time, Mapping[str, Whole]]


@dataclass(frozen=True, slots=True)
class _Spans:
    """A line of `spans.jsonl`."""

    ordinal: Whole
    attempt: Whole
    trajectories: tuple[tuple[_Span, ...], ...]


@dataclass(frozen=True, slots=True)
class _Sample:
    """What the page shows of a line of `samples.jsonl`."""

    ordinal: Whole
    attempt: Whole = 0
    prompt: str | None = None
    response: str = ""
    ground_truth: Any = None
    reward: float | None = None
    finish_reason: str | None = None
    segments: tuple[tuple[Whole, Whole, Whole, int, str], ...] | None = None
    token_ends: tuple[Whole, ...] | None = None
    logprobs: tuple[float | None, ...] = ()
    branches: tuple[Mapping[str, Any], ...] = ()


def _lines(path: Path, read: Callable[[Any], T], unread: Counter[str]) -> Iterator[T]:
    """The records of a file of JSON lines. Counts lines that hold none in `unread`, except an incomplete last line: the
    run may be writing it."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                value = read_json(line)
                record = read(value if isinstance(value, dict) else {})
            except ValueError:
                unread[path.name] += line.endswith(b"\n")
                continue
            yield record


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict) and inner and prefix.count(".") < MAX_DEPTH:
            flat |= _flat(inner, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = inner
    return flat
