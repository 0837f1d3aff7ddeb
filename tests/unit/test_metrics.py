import json
import math
import os
import resource
import signal
import tempfile
import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, StorageError
from asyncrl.json_records import append_line
from asyncrl.observability.events import EventLog
from asyncrl.observability.metrics_log import MetricsLog
from asyncrl.observability.sinks import build_sinks
from asyncrl.observability.sinks.sink_thread import BACKLOG, SinkFeed
from asyncrl.types import LedgerCounts
from asyncrl.types.events import CheckpointFailed, CheckpointSaved, ReplicaFailed
from asyncrl.types.metrics import QUEUE_METRICS, REQUIRED, Metric
from tests.make import quickstart


def record(step, **more):
    return dict.fromkeys(REQUIRED, 0.0) | {"step": step} | more


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_one_object_a_step_and_only_declared_metrics(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(record(1, **{"eval/accuracy/second_set": 0.5, "train/loss": math.nan}))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["train/loss"] is None
    with pytest.raises(ValueError, match="reward/maen"):
        log.write(record(2, **{"reward/maen": 1.0}))
    incomplete = record(2)
    del incomplete["staleness/lag_max"]
    with pytest.raises(ValueError, match="staleness/lag_max"):
        log.write(incomplete)


def test_events_are_json_whatever_they_measured(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write(CheckpointSaved(1, "a", math.inf, math.nan))
    assert "Infinity" not in (tmp_path / "events.jsonl").read_text()


def test_a_pipe_in_place_of_a_file_is_an_error_and_no_wait(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        MetricsLog(tmp_path / "metrics.jsonl").write(record(1))
    os.mkfifo(tmp_path / "samples.jsonl")
    with pytest.raises(StorageError, match=r"samples\.jsonl"):
        append_line(tmp_path / "samples.jsonl", "{}")


def test_a_pipe_with_a_slow_reader_is_an_error_too(tmp_path):
    os.mkfifo(tmp_path / "samples.jsonl")
    reader = os.open(tmp_path / "samples.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(StorageError, match="it is a pipe"):
        append_line(tmp_path / "samples.jsonl", "{}")
    os.close(reader)


def test_a_line_that_is_written_in_part_is_an_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(StorageError, match="of 201 bytes"):
            append_line(tmp_path / "samples.jsonl", "x" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("metric", Metric)
def test_a_declaration_agrees_with_its_key(metric):
    """The suffix of a key is its unit; its group is what comes before the slash."""
    units = {"_per_s": "tokens/s", "_s": "s", "_fraction": "share", "_tokens": "tokens", "bytes": "bytes"}
    unit = next((unit for suffix, unit in units.items() if metric.endswith(suffix)), metric.unit)
    assert (metric.unit, metric.better in ("higher", "lower", "none")) == (unit, True)
    assert (metric.group, metric.of("x")) == (metric.split("/")[0] if "/" in metric else "run", metric.value + "x")


def test_the_counts_of_the_ledger_have_their_metrics():
    assert {field.name for field in fields(LedgerCounts)} <= QUEUE_METRICS.keys()


def test_lines_of_steps_that_will_be_taken_again_are_dropped_and_so_is_a_torn_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.write(record(step))
    with path.open("a") as file:
        file.write('{"step": 6, "rew')
    log.truncate_after(3)
    assert steps(path) == [1, 2, 3]
    log.write(record(4))
    assert steps(path) == [1, 2, 3, 4]


def test_events_of_several_writers_never_mix(tmp_path):
    path = tmp_path / "events.jsonl"
    first, second = EventLog(path), EventLog(path)
    for i in range(50):
        first.write(CheckpointFailed(i, "no space"))
        second.write(ReplicaFailed(0, "x" * 1000, restarts=i))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "checkpoint_failed"] == list(range(50))
    assert len(events) == 100


@pytest.mark.parametrize("key", ["observability.wandb_project=a/b", "run.name=what?"])
def test_what_wandb_cannot_take_is_refused_before_anything_starts(tmp_path, key):
    recipe = quickstart("observability.sinks=[wandb]", key)
    with pytest.raises(ConfigError, match=r"Invalid project name|cannot contain"):
        build_sinks(recipe, {}, recipe.run.name or "test", tmp_path)


class Scripted:
    """A sink that raises, or waits for `free`, at the steps of the script."""

    def __init__(self, script):
        self.script, self.taken, self.free, self.ends = script, [], threading.Event(), []

    def write(self, step, record):
        error = self.script.get(step)
        if error == "blocks":
            self.free.wait()
        elif error is not None:
            raise error
        self.taken.append(step)

    def close(self):
        self.ends.append("close")
        self.write("close", {})

    def abandon(self):
        self.ends.append("abandon")
        self.write("abandon", {})


@given(
    st.dictionaries(
        st.one_of(st.integers(1, 9), st.sampled_from(["close", "abandon"])),
        st.sampled_from([OSError("gone"), SystemExit(1), KeyboardInterrupt(), GeneratorExit(), "blocks"]),
    )
)
def test_whatever_a_sink_does_metrics_are_written_and_what_it_has_not_taken_is_counted(script):
    sink = Scripted(script)
    feed = SinkFeed("scripted", sink)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        log = MetricsLog(path, [feed])
        for step in range(1, 10):
            log.write(record(step))
        feed.close(0.0 if "blocks" in script.values() else 20.0)
        assert steps(path) == list(range(1, 10))
    sink.free.set()
    feed._thread.join(20)
    assert not feed._thread.is_alive()
    raised = [step for step, error in script.items() if error != "blocks" and isinstance(step, int)]
    taken = [step for step in sink.taken if isinstance(step, int)]
    assert taken == [step for step in range(1, 10) if step not in raised], "each was tried once"
    if "blocks" not in script.values():
        assert feed.failed == len(raised)
        assert sink.ends == ["close"]


def test_a_sink_that_is_far_behind_is_left_out_and_counted(tmp_path):
    sink = Scripted({1: "blocks"})
    log = MetricsLog(tmp_path / "metrics.jsonl", [feed := SinkFeed("slow", sink)])
    log.write(record(1))
    while not feed._records.empty():
        time.sleep(0.001)
    for step in range(2, BACKLOG + 12):
        log.write(record(step))
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (feed.failed, last["sinks/failed_records"]) == (10, 9), "the last line cannot know of itself"
    sink.free.set()
    log.close()
    assert sink.taken == [*range(1, BACKLOG + 2), "close"]
