"""The quickstart on a server of SGLang that runs beside it, and that is killed and started again in the middle."""

import importlib.util

import pytest

from tests.e2e.conftest import ROOT, assert_it_outlives_its_server
from tests.sglang_server import SglangServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the package sglang: make test-sglang"),
]


@pytest.fixture
def server(inputs, tmp_path):
    server = SglangServer(ROOT / "runs" / "tiny-qwen3", tmp_path / "server.log", "--context-length", "518").start()
    yield server
    server.kill()


def test_a_run_outlives_its_server_and_publishes_to_the_next_one(start, server):
    remote = f"rollout.remote.urls=[{server.url}]", "rollout.remote.weights=reload", "weights.transport=disk"
    sizes = "rollout.remote.max_model_len=512", "rollout.remote.max_num_seqs=32"
    run = start("run.max_steps=6", *remote, *sizes, recipe="quickstart_remote", joined=False)
    assert_it_outlives_its_server(run, server)
