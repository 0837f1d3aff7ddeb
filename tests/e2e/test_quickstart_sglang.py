"""The quickstart with real SGLang: it learns, with a dead engine process in the middle; and a server of it."""

import importlib.util
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import MODEL, assert_a_dead_engine_is_replaced, assert_sound
from tests.e2e.test_tool_use import assert_agents_ran, assert_calls_were_answered

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the package sglang: make test-sglang"),
]


def test_sglang_serves_what_is_published_and_its_dead_engine_is_replaced(start):
    assert_a_dead_engine_is_replaced(start, "quickstart_sglang")


def test_it_learns_with_a_clean_audit(start):
    run = start("run.max_steps=24", "eval.every_steps=12", recipe="quickstart_sglang", joined=False)
    assert_sound(run, max_lag=2, steps=24, timeout_s=1000)
    assert run.metrics[-1]["eval/accuracy"] >= 0.9


def test_agents_with_tools_learn_from_it_while_a_leased_replica_evaluates(tool_task, start):
    run = start(
        *tool_task,
        "rollout.engine=sglang", "rollout.sglang.max_running_requests=64", "rollout.sglang.max_total_tokens=32768",
        "rollout.sglang.max_model_len=1024",
        "rollout.num_replicas=2", "eval.leased_replicas=1", "eval.every_steps=1", "eval.max_prompts=32",
        "batch.groups_per_step=8", "batch.group_size=8", "run.max_steps=3", "observability.samples_per_step=192",
        recipe="agent", joined=False,
    )  # fmt: skip
    assert_sound(run, max_lag=2, steps=3, timeout_s=900)
    assert_calls_were_answered(run)
    assert_agents_ran(run)
    begun = [e["version"] for e in run.events if e["event"] == "evaluation_started"]
    assert begun, "a replica is leased while training goes on"
    assert begun == [e["version"] for e in run.events if e["event"] == "evaluation" and 0 < e["step"] < 3]


def test_a_server_replaces_a_dead_scheduler_while_it_answers(serve):
    others = set(Path(tempfile.gettempdir()).glob("asyncrl-sglang-*"))
    settings = "sglang.max_model_len=512", "sglang.max_total_tokens=16384"
    server = serve("--engine", "sglang", "--replicas", "2", "--api-key", "secret", *settings)
    found = server.wait_for(lambda f: len(f["replicas"]) == 2, "no fleet", 300)
    client = openai.OpenAI(base_url=found["address"] + "/v1", api_key="secret", max_retries=0, timeout=120)

    def ask(number):
        text = [{"role": "user", "content": f"{number}+7="}]
        answer = client.chat.completions.create(model=MODEL, messages=text, temperature=0, max_tokens=40)
        return answer.choices[0].message.content

    before = ask(12)
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(ask, 12) for _ in range(40)]
        scheduler = next(p for p in server.descendants() if "sglang::scheduler" in p.name())
        scheduler.kill()
        assert {answer.result(180) for answer in answers} == {before}
    pids = {replica["pid"] for replica in found["replicas"]}

    def replaced(fleet):
        return len(fleet["replicas"]) == 2 and {replica["pid"] for replica in fleet["replicas"]} != pids

    server.wait_for(replaced, "the dead replica was not replaced", 300)
    code, alive = server.end(signal.SIGTERM)
    assert not alive
    assert code in (0, 143)
    assert set(Path(tempfile.gettempdir()).glob("asyncrl-sglang-*")) <= others
