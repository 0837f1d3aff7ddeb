"""The quickstart on a `vllm serve` that runs beside it, and that is killed and started again in the middle."""

import pytest

from tests.e2e.conftest import ROOT, assert_it_outlives_its_server
from tests.vllm_server import VllmServer

pytest.importorskip("vllm", reason="needs the package vllm: make install-vllm", exc_type=ImportError)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def server(inputs, tmp_path):
    server = VllmServer(ROOT / "runs" / "tiny-qwen3", tmp_path / "server.log", "--max-num-seqs", "128").start()
    yield server
    server.kill()


@pytest.mark.slow
def test_a_run_outlives_its_server_and_publishes_to_the_next_one(start, server):
    remote = f"rollout.remote.urls=[{server.url}]", "weights.verify=always"
    run = start("run.max_steps=6", *remote, recipe="quickstart_remote", joined=False)
    assert_it_outlives_its_server(run, server)
    assert all(e["verified"] for e in run.events if e["event"] == "publish")


def test_a_run_does_not_start_without_its_server(start, inputs):
    run = start("rollout.remote.urls=[http://127.0.0.1:9]", recipe="quickstart_remote", joined=False)
    assert run.wait(280) == 2, run.log
    assert "http://127.0.0.1:9" in run.log
    assert "start the server first" in run.log
    assert not run.metrics
