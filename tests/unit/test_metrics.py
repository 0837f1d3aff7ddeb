import json
import math
from pathlib import Path

import pytest

from asyncrl.config.load import load_recipe
from asyncrl.observability.events import EventLog
from asyncrl.observability.metrics import REQUIRED, MetricsLog
from asyncrl.observability.sinks import build_sinks
from tests.unit.test_recipes import QUICKSTART

pytestmark = pytest.mark.unit


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
        first.write("a", i=i)
        second.write("b", i=i, text="x" * 1000)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["i"] for e in events if e["event"] == "a"] == list(range(50))
    assert len(events) == 100


def test_the_sinks_take_a_record_without_a_login(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = load_recipe(QUICKSTART, ["observability.sinks=[wandb,tensorboard]"])
    sinks = build_sinks(recipe, "test", tmp_path)
    log = MetricsLog(tmp_path / "metrics.jsonl", sinks)
    log.write(record(1, **{"reward/mean": 0.5}))
    log.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert list(Path(tmp_path).glob("wandb/offline-run-*/*.wandb"))
