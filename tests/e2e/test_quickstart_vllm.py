"""The quickstart with real vLLM: the same model behind another engine, and a dead engine process in the middle."""

import signal

import psutil
import pytest

from tests.e2e.conftest import assert_sound

pytest.importorskip("vllm", reason="needs the package vllm: make install-vllm", exc_type=ImportError)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_vllm_serves_what_is_published_and_its_dead_engine_is_replaced(start):
    """One replica, so that the run depends on each engine that it gets."""
    torch = start("run.max_steps=1", "eval.every_steps=1", name="torch")
    assert torch.wait() == 0, torch.log
    alone = "rollout.num_replicas=1", "weights.verify=always"
    run = start("run.max_steps=6", *alone, recipe="quickstart_vllm", joined=False)
    run.wait_for_step(2, timeout_s=300)
    (replica,) = run.actor_pids("Replica")
    tree = psutil.Process(run.process.pid).children(recursive=True)
    engine = max(psutil.Process(replica).children(recursive=True), key=lambda p: p.memory_info().rss)
    engine.send_signal(signal.SIGKILL)
    run.wait_for_event("replica_serving", count=2, timeout_s=240)
    assert run.wait(500) == 0, run.log
    assert_sound(run, max_lag=2, steps=6)
    assert [e["replica"] for e in run.events if e["event"] == "replica_failed"] == [0]
    assert all(e["verified"] for e in run.events if e["event"] == "publish")
    _, alive = psutil.wait_procs(tree, timeout=20)
    assert not alive, [p.cmdline() for p in alive if p.is_running()]
    # Greedy decoding of the same weights: what differs is rounding.
    initial = [r.metrics[0]["eval/initial_accuracy"] for r in (torch, run)]
    assert initial[0] == pytest.approx(initial[1], abs=0.02)
    samples = run.directory / "samples.jsonl"
    assert samples.stat().st_size > 0
