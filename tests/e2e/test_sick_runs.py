"""Runs that are made sick, and what their report says: the sickness has its name in the page."""

import json
import re

import pytest

from asyncrl.commands.report import main
from tests.e2e.conftest import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NO_CHECKPOINTS = "checkpoint.every_steps=0"


def sicknesses(run):
    """The titles of the findings in the page itself, and its one sentence on speed."""
    assert main([str(run.directory)]) == 0
    page = (run.directory / "report.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    (shown,) = data["runs"]
    return {finding["title"] for finding in shown["findings"]}, shown["helps_most"]


def finished(run):
    assert run.wait() == 0, run.log
    for line in run.metrics:
        for side in ("trainer_time/", "replica_time/"):
            shares = [value for key, value in line.items() if key.startswith(side)]
            assert not shares or sum(shares) == pytest.approx(1), "every second has one cause"
    return sicknesses(run)


def test_a_slow_reward(start):
    slow = "reward.function=tests.e2e.faulty:slow_reward", "reward.workers=1"
    titles, helps = finished(start(*SMALL, NO_CHECKPOINTS, *slow, "run.max_steps=5"))
    assert "Slow environment or reward" in titles
    assert "Starved trainer" not in titles
    assert "a faster environment or reward" in helps


def test_a_run_that_the_guard_stops(start):
    """A learning rate that is far too high, with weight decay, which moves the weights whatever the rewards are, and
    tokens as old as the limit on the lag allows. The guard lowers that limit, which does not help, and the run ends
    with a checkpoint. It goes on from there with a sane rate, and with the limit that it had."""
    old = "staleness.max_lag=4", "staleness.pacing=eager"
    wild = "trainer.lr=0.04", "trainer.weight_decay=5", "trainer.warmup_steps=0", *old
    hasty = "staleness.guard_rules.trip_steps=1", "staleness.guard_rules.stop_steps=1"
    run = start(*SMALL, NO_CHECKPOINTS, *wild, "staleness.guard=act", *hasty, "run.max_steps=40")
    assert run.wait() == 3, run.log
    changes = [event for event in run.events if event["event"] == "guard_changed"]
    assert [change["action"] for change in changes][-1] == "stopped"
    assert changes[0]["action"] == "tightened"
    last = run.metrics[-1]
    assert (last["guard/limit"], last["guard/state"], last["step"]) == (1, 3, changes[-1]["step"])
    (fault,) = [event for event in run.events if event["event"] == "fault"]
    assert changes[-1]["reason"] in fault["message"]
    assert (run.directory / "checkpoints" / f"step_{last['step']}").is_dir()
    for change in changes:
        assert all(
            line["staleness/lag_max"] <= change["limit"] for line in run.metrics if line["step"] > change["step"]
        )
    titles, _ = sicknesses(run)
    assert "Stopped by the off-policy guard" in titles
    sane = "trainer.lr=1e-7", "trainer.weight_decay=0", "staleness.max_lag=4", "resume=auto"
    again = start(*SMALL, NO_CHECKPOINTS, *sane, "staleness.guard=act", f"run.max_steps={int(last['step']) + 2}")
    assert again.wait() == 0, again.log
    resumed = [event for event in again.events if event["event"] == "guard_changed"][len(changes) :]
    assert (resumed[0]["action"], resumed[0]["limit"]) == ("resumed", 1)
