"""The GPU lane on small inputs and whatever device is here: its steps run, and a second call goes on."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import STEPS, _outcome
from tests.processes import ran


def figures(directory):
    return [json.loads(line) for line in (directory / "figures.jsonl").read_text().splitlines()]


def lane(out, *words, timeout_s=240, code=0):
    """What the lane says of its small inputs."""
    return ran("benchmarks/gpu.py", "--size", "tiny", "--out", out, *words, timeout_s=timeout_s, code=code).stdout


@pytest.mark.slow
def test_steps_run_on_small_inputs_and_are_not_done_twice(tmp_path):
    def run(*steps):
        return lane(tmp_path, "--only", *steps, timeout_s=500)

    assert "pair_ipc: passed; not judged: the speed" in run("probe", "pair_ipc")
    assert "pair_ipc: done before" in run("pair_ipc", "communicator")
    lines = figures(tmp_path)
    assert [line["step"] for line in lines if "outcome" in line] == ["probe", "pair_ipc", "communicator"]
    publishes = [line for line in lines if "gb_per_s" in line]
    assert [line["publish"] for line in publishes[:3]] == [0, 1, 2]
    assert len(publishes) == 3 + 3 * 3 + 3, "by bucket, and through host memory"
    assert all(line["gb_per_s"] > 0 for line in publishes)


@pytest.mark.slow
def test_steps_of_each_size_run_on_small_inputs(tmp_path):
    said = lane(tmp_path, "--only", "step_4b", "moe", timeout_s=500)
    assert said.count("passed; not judged: memory and kernels") >= 2
    lines = figures(tmp_path)
    variants = [(line["sequences"], line["offload"]) for line in lines if "sequences" in line]
    assert variants == [(1, False), (8, False), (1, True), (8, True), (8, True)]
    assert sum("step_s" in line for line in lines) == 3 * len(variants)
    assert sum("us_per_tensor" in line for line in lines) == 3, "of the mixture's publish"


@pytest.mark.slow
def test_a_receiver_is_lost_in_the_middle_of_a_transfer(tmp_path):
    assert "fault_kill: passed" in lane(tmp_path, "--only", "fault_kill", code=None)
    (lost,) = [line for line in figures(tmp_path) if "ended" in line]
    assert 0 <= lost["acknowledged"] < lost["buckets"] - 1
    assert lost["ended"].startswith("TransferEnded")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("name", ["communicator", "colocated_vllm"])
def test_a_step_that_needs_a_gpu_is_told_as_left_out(tmp_path, name):
    step = next(replace(step, needs=()) for step in STEPS if step.name == name)
    assert _outcome(step, "tiny", tmp_path / "figures.jsonl", 100.0).startswith("left out: ")


def test_a_step_has_no_more_time_than_the_call(tmp_path):
    step = next(replace(step, needs=()) for step in STEPS if step.name == "fault_kill")
    outcome = _outcome(step, "tiny", tmp_path / "figures.jsonl", 1.0)
    assert outcome.startswith("interrupted after 1 s")


def test_only_what_missed_its_mark_or_was_interrupted_is_tried_again(tmp_path):
    before = {
        "probe": {"outcome": "missed: exit code 1"},
        "communicator": {"abort_s": 0.1},  # its process was lost before it had an outcome
        "pair_ipc": {"outcome": "passed"},
        "quickstart": {"outcome": "left out: ray is not installed"},
    }
    lines = [json.dumps({"step": name, "size": "tiny", **line}) for name, line in before.items()]
    (tmp_path / "figures.jsonl").write_text("\n".join(lines) + "\n")
    said = lane(tmp_path, "--only", *before)
    told = dict(line.split(": ", 1) for line in said.splitlines()[: len(before)])
    assert told["pair_ipc"] == told["quickstart"] == "done before"
    assert told["probe"] == "passed"
    assert told["communicator"] != "done before"


def test_after_its_minutes_the_lane_leaves_steps_for_the_next_call(tmp_path):
    said = lane(tmp_path, "--only", "probe", "--minutes", "0", code=3)
    assert "probe: left for the next call" in said
    assert "| probe | none: it describes the machine | not done yet |" in said
    lane(tmp_path, "--only", "probe")
    assert [line["outcome"] for line in figures(tmp_path) if "outcome" in line] == ["passed"]
