"""Tools and agents in a real run: calls are made, their results come back, and only the policy's tokens are trained."""

import json
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, assert_sound

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="session")
def tool_task():
    """`runs/tiny-tool-qwen3` and `data/tool_*`, made once."""
    subprocess.run([sys.executable, "tools/make_tool_task.py"], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize("recipe", ["tool_use", "agent"])
def test_calls_are_made_and_their_results_are_not_trained(tool_task, start, recipe):
    if recipe == "agent":
        pytest.importorskip("openai")
    small = "batch.groups_per_step=8", "batch.group_size=8", "run.max_steps=3", "eval.every_steps=0"
    run = start(*small, "observability.samples_per_step=192", recipe=recipe)
    assert run.wait() == 0, run.log
    assert_sound(run, max_lag=2, steps=3)
    assert_calls_were_answered(run)
    if recipe == "tool_use":
        assert 0 < run.metrics[-1]["reward/part/tool_calls"] < 0.5
        assert run.metrics[-1]["reward/part/tool_errors"] < 0.1
    else:
        assert_agents_ran(run)


def assert_agents_ran(run):
    assert run.metrics[-1]["reward/part/agent_branches"] == 1
    assert 1 < run.metrics[-1]["reward/part/agent_requests"] < 1.5


def assert_calls_were_answered(run):
    samples = [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]
    answered = [
        s for s in samples if "</calculator>" in s["response"] and "Answer" in s["response"].split("tool\n")[-1]
    ]
    assert answered, "some trajectories call"
    assert len(answered) < len(samples) / 2
    right = sum(s["reward"] > 0 for s in answered) / len(answered)
    others = [s for s in samples if "calculator>" not in s["response"]]
    wrong = sum(s["reward"] > 0 for s in others) / len(others)
    assert right > 0.5 > wrong + 0.4, (right, wrong)
