"""vLLM's processes: several workers, a dead one, and none that is left behind. The tests of the last two run this file
as a program: an owner that starts an engine, publishes, tells what it generates, and waits to be killed."""

import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import VllmEngineConfig
from asyncrl.errors import GenerationError, WeightTransferError
from asyncrl.inference.cpu_time import DECODE_NICENESS
from asyncrl.inference.vllm.engine import VllmEngine
from asyncrl.types import IpcSource
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports import build_sender
from asyncrl_testing.engine_client import Client, complete, make_request, within
from asyncrl_testing.random_model import greedy_continuation, random_qwen3, write_random_qwen3
from tests.engines import assert_cannot_start, assert_dead, running, started, vllm_engine
from tests.make import require_vllm
from tests.processes import ROOT, assert_gone, killed

pytestmark = pytest.mark.slow

SHAPE = {"tie_word_embeddings": False, "num_hidden_layers": 2}
PROMPT = (5, 6, 7, 8)
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    require_vllm()
    return write_random_qwen3(tmp_path_factory.mktemp("model"), **SHAPE)


def published():
    return list(random_qwen3(seed=1, **SHAPE).named_parameters())


@pytest.fixture
def no_shared_memory_left():
    """Workers that were killed cannot unlink the memory through which vLLM let them talk."""
    before = set(Path("/dev/shm").glob("vllm_dist_*"))
    yield
    for path in set(Path("/dev/shm").glob("vllm_dist_*")) - before:
        path.unlink(missing_ok=True)


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.timeout(400)
def test_every_worker_gets_the_weights_and_dies_with_the_owner(model_path, workers):
    command = [sys.executable, "-m", "tests.contract.test_vllm_processes", str(model_path), str(workers)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner, killed(owner):
        report = json.loads(next(line for line in owner.stdout if line.startswith("{")))
        below = psutil.Process(owner.pid).children(recursive=True)
        assert len(below) >= workers
    assert_gone(below, 10.0)
    model = random_qwen3(seed=1, **SHAPE)
    assert report["digests_agree"]
    assert report["ids"] == greedy_continuation(model, PROMPT, 16)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *report["ids"]]])).logits[0, len(PROMPT) - 1 : -1]
    reference = logits.log_softmax(-1).gather(1, torch.tensor(report["ids"])[:, None])[:, 0]
    np.testing.assert_allclose(report["logprobs"], reference, rtol=0, atol=2e-5)


FULL = {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory_bytes": 4 << 20, "enable_prefix_caching": False}
"""The cache holds far less than eight requests of 1,024 tokens."""


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.timeout(400)
async def test_requests_that_a_full_cache_preempts_are_counted_and_complete(tmp_path):
    path = write_random_qwen3(tmp_path, max_position_embeddings=1024, **SHAPE)
    engine = vllm_engine(path, real=True, **FULL)
    assert engine.health().preemptions is None
    async with running(engine):
        assert engine.health().preemptions == 0
        clients = await within(asyncio.gather(*(complete(engine, prompt=PROMPT, max_tokens=900) for _ in range(8))))
        assert [len(client.ids) for client in clients] == [900] * 8
        assert engine.health().preemptions > 0


async def own(path, workers):
    """Serves the last of two publishes: the first is loaded as it comes, the second staged."""
    engine = await started(vllm_engine(path, tensor_parallel_size=workers, **SMALL))
    with closing(build_sender("ipc", 1 << 16, workers)) as sender:
        source, weights, agree = sender.open(), published(), []
        manifest = make_manifest(1, 0, [spec_of(*w) for w in weights], 1 << 16)
        await engine.pause("abort")
        for receive, sent in (
            (engine.load_weights, [(name, torch.zeros_like(tensor)) for name, tensor in weights]),
            (engine.stage_weights, weights),
        ):
            sending = asyncio.create_task(asyncio.to_thread(sender.send, manifest, sent, 30.0))
            received = await receive(manifest, source, 30.0)
            agree.append(received == await sending)
            manifest = replace(manifest, publish_id=2, is_staged=True)
        await engine.load_staged(30.0)
    await engine.commit(0)
    await engine.resume()
    client = await complete(engine, prompt=PROMPT, max_tokens=16, temperature=0.0)
    report = {"ids": client.ids, "logprobs": client.logprobs, "digests_agree": all(agree)}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    await asyncio.sleep(600)


@pytest.mark.timeout(400)
async def test_a_compiled_model_is_not_compiled_again(model_path, tmp_path, monkeypatch):
    """vLLM stores it, but by itself it does not load what it stores on a CPU."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    settings = VllmEngineConfig(max_model_len=128, max_num_seqs=4)

    async def start_and_generate():
        async with running(VllmEngine(ModelConfig(path=str(model_path)), settings, load_real_weights=True)) as engine:
            client = await complete(engine, prompt=PROMPT, max_tokens=16, temperature=0.0)
        (stored,) = tmp_path.glob("torch_compile_cache/torch_aot_compile/*/*/model")
        return (stored, stored.stat().st_mtime_ns), client

    compiled, first = await start_and_generate()
    loaded, second = await start_and_generate()
    assert loaded == compiled
    assert second.ids == first.ids
    assert second.logprobs == first.logprobs


async def test_a_dead_engine_core_is_noticed_while_idle_and_fails_everything(model_path):
    async with running(vllm_engine(model_path, real=True, **SMALL)) as engine:
        begun = Client(engine, make_request(max_tokens=100))
        await begun.first_tokens()
        await within(engine.pause("keep"))
        queued = Client(engine, make_request())
        nobody = IpcSource(
            endpoint="ipc:///nowhere", path="none", host=platform.node(), bucket_bytes=4096, num_receivers=1, epoch=0
        )
        manifest = make_manifest(1, 1, [spec_of(*w) for w in published()], 4096)
        loading = asyncio.create_task(engine.load_weights(manifest, nobody, 60.0))
        await asyncio.sleep(0)
        core = next(p for p in psutil.Process().children(recursive=True) if "EngineCore" in p.name())
        assert core.nice() == min(19, os.getpriority(os.PRIO_PROCESS, 0) + DECODE_NICENESS)
        core.kill()
        for client in (begun, queued):
            with pytest.raises(GenerationError, match="EngineCore"):
                await within(client.task, 10.0)
        with pytest.raises(WeightTransferError):
            await within(loading, 10.0)
        assert "EngineCore" in engine.health().detail
        await assert_dead(engine, "EngineCore")
    assert not [p for p in psutil.Process().children(recursive=True) if "VLLM" in _name(p)]


async def test_an_engine_that_cannot_start_says_why(tmp_path):
    await assert_cannot_start(partial(vllm_engine, real=True, **SMALL), tmp_path, "broken-model")


def _name(process):
    """Empty of one that has ended, whether or not anybody has waited for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.name()
    return ""


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1], int(sys.argv[2])))
