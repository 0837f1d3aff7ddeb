"""Megatron-core in whole runs: a killed rank, a change of backend, layouts that learn."""

import subprocess
import sys

import pytest

from asyncrl.commands.export import main as export
from tests.e2e.conftest import ALERT, ROOT, SMALL, assert_audited, assert_sound, events, finish, kill_a_rank
from tests.make import needs_megatron

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    needs_megatron,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

PIPELINE = ("trainer.megatron.tensor_parallel=1", "trainer.megatron.pipeline_parallel=2")


def test_a_killed_rank_is_replaced_and_the_run_goes_on_with_the_other_backend(start, tmp_path):
    run = start(*SMALL, *ALERT, *PIPELINE, "run.max_steps=2000", recipe="quickstart_megatron")
    run.wait_for_event("checkpoint", timeout_s=400)
    lost = kill_a_rank(run)
    run.wait_for_event("training_restarted", timeout_s=240)
    assert [e["process"] for e in events(run, "training_failed")] == [lost]
    assert events(run, "training_restarted")[0]["checkpoint"].startswith("step_")
    finish(run)
    assert not events(run, "replica_failed"), "the replicas stayed"
    step = run.metrics[-1]["step"]
    refused = start(*SMALL, *ALERT, "run.max_steps=2000", "resume=auto")
    assert refused.wait() == 2, refused.log
    assert "--to fsdp" in refused.log
    assert export([str(run.directory), str(tmp_path / "converted"), "--to", "fsdp"]) == 0
    # the checkpoint may hold the groups of max_lag + 1 steps, if the signal came after a publish
    after = start(*SMALL, *ALERT, f"run.max_steps={step + 3}", "resume=auto", name="converted")
    assert_audited(after, max_lag=2, steps=step + 3)
    assert events(after, "resume")[-1]["checkpoint"] == f"step_{step}"


@pytest.fixture(scope="module")
def mixture(inputs, tmp_path_factory):
    """A mixture that starts as good as the tiny model is."""
    path = tmp_path_factory.mktemp("mixture") / "model"
    call = [sys.executable, "tools/make_mixture.py", "--model", "runs/tiny-qwen3", "--out", str(path)]
    subprocess.run(call, cwd=ROOT, check=True, timeout=300)
    return path


def test_experts_over_two_ranks_learn(mixture, start):
    """From the tiny model's guessing, in a quarter of the quickstart's steps."""
    experts = f"model.path={mixture}", "trainer.megatron.tensor_parallel=1", "trainer.megatron.expert_parallel=2"
    run = start(*experts, "run.max_steps=20", "eval.every_steps=20", recipe="quickstart_megatron")
    assert_sound(run, max_lag=2, steps=20, timeout_s=600)
    first, last = run.metrics[0]["eval/initial_accuracy"], run.metrics[-1]["eval/accuracy"]
    assert last > first + 0.2, (first, last)
