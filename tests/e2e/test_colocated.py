"""Real runs in which the embedded engine and the trainer take turns."""

import psutil
import pytest

from tests.e2e.conftest import ALERT, SMALL, assert_audited, assert_sound, events

pytestmark = pytest.mark.slow

COLOCATED = "placement=colocated"
SHORT = "trainer.step_timeout_s=120", "weights.publish_timeout_s=60"


@pytest.mark.parametrize(("mode", "max_lag"), [("sync", 0), ("one_step_off", 1)])
def test_generation_and_training_take_turns(start, mode, max_lag):
    run = start(*SMALL, COLOCATED, f"mode={mode}", *SHORT, "run.max_steps=5", "ray.health_interval_s=0.5")
    assert_sound(run, max_lag=max_lag, steps=5)
    turns = [(e["event"], e.get("step", e.get("version"))) for e in run.events]
    turns = [turn for turn in turns if turn[0] in ("engines_slept", "step", "publish")]
    each = [(("engines_slept", n), ("step", n), ("publish", n)) for n in range(1, 6)]
    assert turns == [("publish", 0), *(turn for step in each for turn in step)]
    assert all(e["replicas"] == [0, 1] for e in events(run, "engines_slept"))
    for line in run.metrics:
        trained_s = line["train/step_s"]
        assert line["sleep/asleep_s"] >= trained_s, "the engines slept at least as long as the step took"
        assert line["trainer_time/sleep"] > 0
    timed = [line for line in run.metrics if "replica_time/asleep" in line]
    assert timed
    for line in timed:
        assert sum(value for key, value in line.items() if key.startswith("replica_time/")) == pytest.approx(1)
    assert any(line["replica_time/asleep"] > 0 for line in timed)


def test_a_run_that_takes_turns_trains_what_a_separate_one_trains(start):
    """Seeds decide what is sampled: the first step trains the same groups, and the others differ by rounding only."""
    keys = *SMALL, "mode=sync", "rollout.num_replicas=1", "run.max_steps=4"
    apart, shared = start(*keys, name="apart"), None
    assert apart.wait() == 0, apart.log
    shared = start(*keys, COLOCATED, name="shared")
    assert shared.wait() == 0, shared.log
    lines = list(zip(apart.metrics, shared.metrics, strict=True))
    assert lines[0][0]["reward/mean"] == lines[0][1]["reward/mean"]
    assert lines[0][0]["train/trained_tokens"] == lines[0][1]["train/trained_tokens"]
    for name in ("train/loss", "train/grad_norm"):
        assert lines[0][0][name] == pytest.approx(lines[0][1][name], rel=0.05, abs=1e-3)
    for one, other in lines:
        assert one["reward/mean"] == pytest.approx(other["reward/mean"], abs=0.15)


def test_a_replica_that_dies_asleep_is_replaced_and_a_resumed_run_goes_on(start):
    run = start(*SMALL, COLOCATED, "mode=sync", "run.max_steps=4", *ALERT)
    run.wait_for_event("engines_slept")
    psutil.Process(run.actor_pids("Replica")[0]).kill()
    assert_sound(run, max_lag=0, steps=4)
    assert [e["replica"] for e in events(run, "replica_failed")] == [0]
    again = start(*SMALL, COLOCATED, "mode=sync", "run.max_steps=6", "resume=auto", *ALERT)
    assert_audited(again, max_lag=0, steps=6)
