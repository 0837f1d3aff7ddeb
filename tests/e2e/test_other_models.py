"""Runs with other models beside the policy, for real on a CPU: a teacher that teaches, a judge, and their deaths."""

import os
import signal
import subprocess
import sys

import pytest

from tests.e2e.conftest import ALERT, ROOT, SMALL, assert_audited, events, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["teacher", "judge"])
def role(request):
    """A tiny model of this role, as make quickstart-distill and quickstart-judge make it."""
    role = request.param
    tool = [sys.executable, "tools/make_tiny_model.py", "--role", role, "--out", f"runs/tiny-{role}"]
    subprocess.run(tool, cwd=ROOT, check=True, timeout=600)
    return role


def test_a_policy_learns_from_another_model(start, role):
    recipe = {"teacher": "quickstart_distill", "judge": "quickstart_judge"}[role]
    run = start("run.max_steps=16", "eval.every_steps=16", recipe=recipe)
    assert_audited(run, max_lag=2, steps=16, timeout_s=600)
    first, last = run.metrics[0], run.metrics[-1]
    if role == "teacher":
        assert last["train/kl_teacher"] < 0.6 * first["train/kl_teacher"]
        assert last["eval/accuracy"] > first["eval/initial_accuracy"] + 0.1
    else:
        assert last["reward/part/judge"] > first["reward/part/judge"] + 0.15
        assert last["reward/mean"] == pytest.approx(last["reward/part/judge"]), "nothing else teaches"


def test_a_policy_learns_from_the_likeliest_tokens_of_a_teacher(start):
    """With the policy's first weights as the teacher the divergence over the top k is 0 at first; with another one it
    falls."""
    tool = [sys.executable, "tools/make_tiny_model.py", "--role", "teacher", "--out", "runs/tiny-teacher"]
    subprocess.run(tool, cwd=ROOT, check=True, timeout=600)
    keys = ("batch.groups_per_step=16", "eval.every_steps=0", "algorithm.distillation.top_k=32")
    same = start(*keys, "teacher.path=runs/tiny-qwen3", "run.max_steps=1", recipe="quickstart_distill", name="same")
    assert same.wait(600) == 0, same.log
    assert abs(same.metrics[0]["train/kl_teacher_top"]) < 1e-4
    run = start(*keys, "run.max_steps=8", recipe="quickstart_distill")
    assert_audited(run, max_lag=2, steps=8, timeout_s=600)
    first, last = run.metrics[0], run.metrics[-1]
    assert first["train/kl_teacher_top"] > 0.01
    assert last["train/kl_teacher_top"] < 0.7 * first["train/kl_teacher_top"]
    assert last["train/kl_teacher"] < first["train/kl_teacher"]


def test_a_policy_and_its_teacher_agree_before_the_first_step_and_both_are_replaced(start):
    """The teacher has the policy's first weights: what its pool says of a token is what the trainer computes."""
    keys = (*SMALL, *ALERT, "batch.groups_per_step=8", "batch.group_size=2", "teacher.path=runs/tiny-qwen3")
    run = start(*keys, "run.max_steps=200", recipe="quickstart_distill")
    run.wait_for_step(2)
    assert abs(run.metrics[0]["train/kl_teacher"]) < 1e-3
    victims = run.actor_pids("Replica")
    assert len(victims) == 2, "one of the policy, one of the teacher"
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    run.wait_for_event("model_replica", count=2)
    run.wait_for_event("replica_started")
    finish(run, more_steps=2)
    assert [(e["pool"], e["replica"], e["change"]) for e in events(run, "model_replica")] == [
        ("teacher", 0, "replica_failed"),
        ("teacher", 0, "replica_started"),
    ]
    assert not run.transitions("failed"), "groups waited for the next teacher"
