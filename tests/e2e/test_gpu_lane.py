"""The GPU lane on small inputs and whatever device is here: its steps run, and a second call goes on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_steps_run_on_small_inputs_and_are_not_done_twice(tmp_path):
    lane = [sys.executable, "benchmarks/gpu.py", "--size", "tiny", "--out", str(tmp_path)]

    def run(*steps):
        done = subprocess.run([*lane, "--only", *steps], cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "pair_ipc: passed" in run("probe", "pair_ipc")
    assert "pair_ipc: done before" in run("pair_ipc", "communicator")
    lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "outcome" in line] == ["probe", "pair_ipc", "communicator"]
    publishes = [line for line in lines if "gb_per_s" in line]
    assert [line["publish"] for line in publishes] == [0, 1, 2]
    assert all(line["gb_per_s"] > 0 for line in publishes)
