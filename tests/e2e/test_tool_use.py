"""Tools and agents in a real run: calls are made, their results come back, and only the policy's tokens are trained."""

import json
import math
import os
import re
import shutil
import sys

import psutil
import pytest

from tests.e2e.conftest import ROOT, SMALL, assert_sound, below, made_tool_task
from tests.processes import ran
from tests.server_process import listening

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("recipe", ["tool_use", "agent"])
def test_calls_are_made_and_their_results_are_not_trained(tool_task, start, recipe):
    if recipe == "agent":
        pytest.importorskip("openai")
    small = "batch.groups_per_step=8", "batch.group_size=8", "run.max_steps=3", "eval.every_steps=0"
    run = start(*tool_task, *small, "observability.samples_per_step=192", recipe=recipe)
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
    samples = run.samples
    answered = [
        s for s in samples if "</calculator>" in s["response"] and "Answer" in s["response"].split("tool\n")[-1]
    ]
    assert answered, "some trajectories call"
    assert len(answered) < len(samples) / 2
    assert_calls_help(answered, [s for s in samples if "calculator>" not in s["response"]])


def assert_calls_help(called, others):
    right, wrong = (sum(s["reward"] > 0 for s in samples) / len(samples) for samples in (called, others))
    assert right > 0.2 > wrong + 0.1, (right, wrong)


def test_calls_within_a_response_are_made_and_their_results_are_not_trained(start, tmp_path):
    small = "batch.groups_per_step=8", "batch.group_size=8", "run.max_steps=3", "eval.every_steps=0"
    task = made_tool_task("interleaved", tmp_path)
    run = start(*task, *small, "observability.samples_per_step=192", recipe="interleaved_tool_use")
    assert_sound(run, max_lag=2, steps=3, timeout_s=600)
    assert 0 < run.metrics[-1]["reward/part/tool_calls"] < 0.5
    samples = run.samples
    called = [s for s in samples if re.match(r"<tool>[\d*+-]+</tool><result>-?\d+</result>", s["response"])]
    assert called, "some responses call"
    assert_calls_help(called, [s for s in samples if "tool>" not in s["response"]])
    for sample in called:
        kinds = [kind for *_, kind in sample["segments"]]
        inserted = [stop - start for start, stop, *_, kind in sample["segments"] if kind == "environment"]
        result = sample["response"].partition("<result>")[2].partition("</result>")[0]
        assert inserted[0] == len("<result>") + len(result) + len("</result>"), "each of them is spelled"
        assert kinds[0] == "policy"


def test_agents_that_are_programs_are_trained(tool_task, start):
    small = "batch.groups_per_step=2", "batch.group_size=8", "run.max_steps=2", "eval.every_steps=0"
    run = start(*tool_task, *small, "observability.samples_per_step=32", recipe="agent_program")
    assert_sound(run, max_lag=2, steps=2, timeout_s=600)
    assert run.metrics[-1]["reward/part/agent_branches"] == 1
    assert run.metrics[-1]["queue/failed"] == 0
    assert not [p for p in below(psutil.Process()) if "calculator.py" in " ".join(p.info["cmdline"] or ())]


@pytest.mark.environments
def test_repositories_are_repaired_in_sandboxes(start, tmp_path):
    """By mini-swe-agent, each in a sandbox of its own, and the tests of the repository are the reward."""
    pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed: pip install mini-swe-agent")
    made = ["tools/make_swe_task.py", "--out", f"{tmp_path}/model", "--data", str(tmp_path), "--share", "0.5"]
    ran(*made, timeout_s=600)
    files = f"data.train={tmp_path}/swe_train.jsonl", f"data.eval={{held_out: {tmp_path}/swe_test.jsonl}}"
    place = f"model.path={tmp_path}/model", f"rollout.agent.sandbox.files={tmp_path}/swe_repositories"
    command = f"rollout.agent.command=['{sys.executable}', recipes/agents/swe_tiny.py]"
    small = "batch.groups_per_step=2", "run.max_steps=2", "eval.every_steps=0", "observability.samples_per_step=32"
    run = start(*files, *place, command, *small, recipe="swe_tiny")
    assert_sound(run, max_lag=2, steps=2, timeout_s=600)
    last = run.metrics[-1]
    assert (last["queue/failed"], last["sandboxes/failed"], last["reward/part/agent_trained_share"]) == (0, 0, 1)
    assert last["sandboxes/opened"] >= 16
    assert {s["reward"] for s in run.samples} <= {0, 1}
    repaired = [s for s in run.samples if "sed -i" in s["response"]]
    assert all(s["reward"] == 0 for s in run.samples if s not in repaired), "the faults are real"
    assert not [p for p in below(psutil.Process()) if "swe_tiny.py" in " ".join(p.info["cmdline"] or ())]


def test_all_branches_of_agents_with_a_sub_agent_are_trained(inputs, start):
    pytest.importorskip("openai")
    limits = "rollout.sampling.max_response_tokens=16", "rollout.tool_use.max_trajectory_tokens=128"
    agent = "rollout.environment=agent", "rollout.agent.function=tests.plugins.sub_agent:agent", *limits
    whole = "rollout.agent.train=all_branches", "observability.samples_per_step=32"
    run = start(*SMALL, *agent, *whole, "run.max_steps=2")
    assert_sound(run, max_lag=2, steps=2, timeout_s=600)
    last = run.metrics[-1]
    assert (last["reward/part/agent_branches"], last["reward/part/agent_requests"]) == (2, 4)
    assert (last["queue/failed"], last["queue/trained"]) == (0, 8)
    samples = run.samples
    of_main = [sum(stop - start for start, stop, *_, kind in s["segments"] if kind == "policy") for s in samples]
    assert last["train/trained_tokens"] > 1.4 * 16 * sum(of_main) / len(of_main), "the sub-agent's tokens, too"


def test_tools_of_an_mcp_server_are_trained(tool_task, start):
    pytest.importorskip("mcp", reason="the package mcp is not installed: pip install 'asyncrl[mcp]'")
    small = "batch.groups_per_step=4", "batch.group_size=4", "run.max_steps=2", "eval.every_steps=0"
    server = (
        f"rollout.tool_use.mcp={{office: {{command: ['{sys.executable}', '{ROOT}/tests/mcp_tools.py'], tools: [add]}}}}"
    )
    run = start(
        *tool_task, *small, server, "data.max_prompt_tokens=128", "observability.samples_per_step=32", recipe="tool_use"
    )
    assert_sound(run, max_lag=2, steps=2, timeout_s=600)
    assert 0 < run.metrics[-1]["reward/part/tool_calls"] < 1
    assert run.metrics[-1]["queue/failed"] == 0


def test_an_environment_of_gymnasium_is_trained(inputs, start):
    pytest.importorskip("gymnasium", reason="the package gymnasium is not installed: pip install 'asyncrl[gymnasium]'")
    small = "batch.groups_per_step=2", "batch.group_size=4", "run.max_steps=2"
    run = start(*small, "observability.samples_per_step=16", recipe="gymnasium")
    assert_trained(run)
    assert 0 <= run.metrics[-1]["reward/part/episode_ended"] <= 1


@pytest.mark.environments
def test_an_environment_of_verifiers_is_trained(inputs, start, tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed: pip install 'asyncrl[verifiers]'")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([f"{ROOT}/tests/plugins", os.environ.get("PYTHONPATH", "")]))
    env = {"taskset": {"id": "doubling-taskset"}, "agent": {"runtime": {"type": "subprocess"}}}
    run = start(*of_others(tmp_path), "rollout.environment=verifiers", f"rollout.verifiers.env={env}", joined=False)
    assert_trained(run)
    assert run.metrics[-1]["reward/part/metric.turns"] == 2


@pytest.mark.environments
def test_an_environment_of_openenv_is_trained(inputs, start, tmp_path):
    pytest.importorskip(
        "openenv.core.generic_client", reason="openenv is not installed: pip install 'asyncrl[openenv]'"
    )
    with listening(sys.executable, f"{ROOT}/tests/openenv_server.py") as (_, port):
        settings = f"{{url: 'http://127.0.0.1:{port}', action: guess, observation: text, max_turns: 3}}"
        run = start(*of_others(tmp_path), "rollout.environment=openenv", f"rollout.openenv={settings}")
        assert_trained(run)
    assert 0 < run.metrics[-1]["reward/mean"] <= 3


IN_THE_LANE = "openai_agents", "mini_swe_agent", "langgraph_agent", "smolagents_code"


@pytest.mark.parametrize(
    ("programs", "needs", "branches"),
    [
        pytest.param(IN_THE_LANE, ".venv-harnesses/bin/python", 1.0, marks=pytest.mark.environments),
        (["claude_code"], "claude", 1),
        (["codex"], "codex", 1),
    ],
    ids=["in_the_lane", "claude_code", "codex"],
)
def test_harnesses_are_trained_unmodified(start, tmp_path, programs, needs, branches):
    """Each program plays one group."""
    if shutil.which(ROOT / needs if "/" in needs else needs) is None:
        pytest.skip(f"{needs} is not here: recipes/agent_harness.yaml says how to install it")
    command = [f"{ROOT}/{needs}" if "/" in needs else sys.executable, "tests/plugins/harnesses.py", *programs]
    small = "batch.groups_per_step=2", "batch.group_size=2", "run.max_steps=2", "eval.every_steps=0"
    task = *made_tool_task("harness", tmp_path), "rollout.tool_use.max_trajectory_tokens=8192"
    run = start(*task, *small, f"rollout.agent.command={command}", recipe="agent_harness")
    assert_sound(run, max_lag=2, steps=2, timeout_s=800)
    assert sum(record["reward/part/agent_branches"] for record in run.metrics) / 2 == branches
    for record in run.metrics:
        told = [record[f"reward/part/agent_{name}"] for name in ("requests", "trained_share")]
        assert (told, record["queue/failed"]) == ([2, 1], 0)
    assert all("Answer: " in sample["response"] for sample in run.samples)


def of_others(tmp_path):
    """Overrides for a short run of an environment that gives the reward itself."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Play.", "answer": "none"}))
    small = "batch.groups_per_step=2", "batch.group_size=4", "run.max_steps=2", "eval.every_steps=0"
    limits = "rollout.sampling.max_response_tokens=16", "rollout.tool_use.max_trajectory_tokens=400"
    return (*small, *limits, f"data.train={tmp_path}/rows.jsonl", "reward.function=zero")


def assert_trained(run):
    assert_sound(run, max_lag=2, steps=2, timeout_s=600)
    last = run.metrics[-1]
    assert math.isfinite(last["reward/mean"])
    assert (last["queue/failed"], last["queue/trained"]) == (0, 4)
