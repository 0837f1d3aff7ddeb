"""Real runs whose fleet changes while they train: by the command, by notices of their machines, by kills."""

import os
import random
import signal
import time

import pytest

from tests.e2e.conftest import ALERT, ROOT, SMALL, events, finish, two_nodes
from tests.processes import ran

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def scale(run, *words):
    """The exit code and the output of `asyncrl-scale`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = ran("-m", "asyncrl.commands.scale", run.directory, *words, env=environment, timeout_s=260, code=None)
    return done.returncode, done.stdout + done.stderr


def scaled(run, replicas):
    """Returns when so many serve."""
    code, told = scale(run, f"replicas={replicas}", "--wait", "150")
    assert code == 0, told + run.log
    assert f"wanted {replicas} " in told
    assert len(run.actor_pids("Replica")) == replicas


def trains_on(run, steps=2):
    run.wait_for_step(max(record["step"] for record in run.metrics) + steps)


def test_a_run_grows_and_shrinks_by_the_command_and_loses_nothing(start):
    run = start(*SMALL, *ALERT, "ray.health_timeout_s=30", "run.max_steps=5000")
    run.wait_for_step(1)
    assert scale(run)[1].startswith("wanted 1 (from 1 to 10000), there 1\n  replica 0: serving")
    scaled(run, 3)
    trains_on(run)
    assert run.metrics[-1]["weights/replicas"] == 3
    code, told = scale(run, "replicas=0")
    assert (code, "replicas=N" in told) == (2, True)
    scaled(run, 2)
    trains_on(run)
    assert run.metrics[-1]["weights/replicas"] == 2
    finish(run)
    resized = [(e["former"], e["replicas"]) for e in events(run, "fleet_resized")]
    assert resized == [(1, 3), (3, 2)]
    assert sorted(e["replica"] for e in events(run, "replica_joined")) == [1, 2]
    assert [(e["replica"], e["why"]) for e in events(run, "replica_left")] == [(2, "scaled")]
    assert not events(run, "replica_failed")
    code, told = scale(run)
    assert (code, "no run is in progress" in told) == (2, True)


@pytest.fixture
def nodes():
    with two_nodes() as cluster:
        yield cluster


def test_joins_leaves_notices_and_kills_at_random_moments_lose_nothing(start, nodes):
    draw = random.Random(0)
    keys = "rollout.num_replicas=2", "rollout.max_replicas=3", "weights.transport=collective", "run.max_steps=5000"
    alert = "ray.health_interval_s=0.5", "ray.health_timeout_s=30"
    run = start(*SMALL, *alert, *keys, f"ray.address={nodes.address}", joined=False)
    run.wait_for_event("replica_serving", count=3, timeout_s=240)  # one of them has joined by itself

    def hit(blow):
        time.sleep(draw.random())
        os.kill(draw.choice(run.actor_pids("Replica")), blow)

    hit(signal.SIGTERM)
    run.wait_for_event("replica_left")
    run.wait_for_event("replica_joined", count=2)
    hit(signal.SIGKILL)
    run.wait_for_event("replica_failed")
    time.sleep(draw.random())
    scaled(run, 2)
    trains_on(run)
    scaled(run, 3)
    finish(run)
    left = [e["why"] for e in events(run, "replica_left")]
    assert left == ["preempted", "scaled"]
    assert len(events(run, "replica_failed")) == 1, "the notice costs no restart"
    assert len(events(run, "replica_joined")) == 3
