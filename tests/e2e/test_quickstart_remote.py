"""The quickstart on a server of an engine that runs beside it, and that is killed and started again in the middle."""

import pytest

from tests.e2e.conftest import ROOT, assert_it_outlives_its_server
from tests.make import require_sglang, require_vllm
from tests.sglang_server import SglangServer
from tests.vllm_server import VllmServer

pytestmark = pytest.mark.timeout(1200)

TINY = ROOT / "runs" / "tiny-qwen3"


def outlives(start, server, *settings):
    try:
        remote = f"rollout.remote.urls=[{server.start().url}]"
        run = start("run.max_steps=6", remote, *settings, recipe="quickstart_remote", joined=False)
        assert_it_outlives_its_server(run, server)
    finally:
        server.kill()
    return run


@pytest.mark.slow
def test_a_run_outlives_its_server_and_publishes_to_the_next_one(start, tmp_path):
    require_vllm()
    server = VllmServer(TINY, tmp_path / "server.log", "--max-num-seqs", "128")
    run = outlives(start, server, "weights.verify=always")
    assert all(e["verified"] for e in run.events if e["event"] == "publish")


@pytest.mark.slow
@pytest.mark.sglang
def test_a_run_outlives_its_server_of_sglang(start, tmp_path):
    require_sglang()
    server = SglangServer(TINY, tmp_path / "server.log", "--context-length", "518")
    sizes = "rollout.remote.max_model_len=512", "rollout.remote.max_num_seqs=32"
    outlives(start, server, "rollout.remote.weights=reload", "weights.transport=disk", *sizes)


def test_a_run_does_not_start_without_its_server(start):
    run = start("rollout.remote.urls=[http://127.0.0.1:9]", recipe="quickstart_remote", joined=False)
    assert run.wait(280) == 2, run.log
    assert "http://127.0.0.1:9" in run.log
    assert "start the server first" in run.log
    assert not run.metrics
