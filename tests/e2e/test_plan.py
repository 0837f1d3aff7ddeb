"""`asyncrl-plan` with a real probe."""

import json

import pytest

from tests.e2e.conftest import SMALL
from tests.processes import ran

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_probe_measures_a_run_and_predicts_it(inputs, tmp_path):
    """The prediction of the probe's own configuration, and of another mode. How near it comes is for a quiet machine:
    benchmarks/plan.py."""
    costs = tmp_path / "costs.yaml"
    asked = ["--probe", "--json", "--vary", "mode=sync,fully_async", "--write", str(costs)]
    command = "-m", "asyncrl.commands.plan", "recipes/quickstart.yaml", *SMALL
    done = ran(*command, *asked, timeout_s=280)
    probed, sync, free = (row["forecast"] for row in json.loads(done.stdout)["rows"])
    assert (probed["lag_max"], sync["lag_max"], free["lag_max"]) == (0, 0, 2)
    assert 0.4 < sync["step_s"] / probed["step_s"] < 2.5
    assert sync["publish_s"] > 0
    assert "samples/s" in ran(*command, "--costs", costs).stdout
