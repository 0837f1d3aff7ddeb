"""The trainer's and the engines' turns on shared devices, as the events tell them."""

import json
from types import SimpleNamespace

from asyncrl.driver.publisher import Colocation
from asyncrl.driver.step_record import StepClock
from asyncrl.observability.events import EventLog
from asyncrl.types import ReplicaTable


async def test_the_turn_of_the_first_step_is_asked_for_as_0_and_told_as_1(tmp_path):
    asked = []

    async def sleep():
        asked.append("sleep")

    replicas = SimpleNamespace(table=ReplicaTable(0, {}))
    events = EventLog(tmp_path / "events.jsonl")
    parts = SimpleNamespace(replicas=replicas, engines=SimpleNamespace(sleep=sleep), events=events)
    clock = StepClock(0.0)
    await Colocation(parts, clock).to_trainer(0)
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (asked, event["event"], event["step"]) == (["sleep"], "engines_slept", 1)
